// Sending and receiving: tags out of order, from anyone, in pieces, given up half way, with a second thread that helps.
#include <algorithm>
#include <atomic>

#include "crew.h"

namespace {

constexpr int64_t PART_BYTES = 256;
constexpr int64_t RING_BYTES = 4 * (64 + PART_BYTES); // four frames

std::vector<char> text(int from, int to, int tag, int64_t num_bytes) {
    std::vector<char> bytes(num_bytes + 1); // never empty, so that its place is one
    for (int64_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<char>(from * 31 + to * 17 + tag * 7 + i);
    return bytes;
}

struct Message {
    int peer, tag;
    std::vector<char> bytes;
    int64_t num_bytes;
    pt_transfer* transfer;
};

template <typename T> void shuffle(std::vector<T>& list, Random& random) {
    for (auto i = static_cast<int64_t>(list.size()) - 1; i > 0; --i) std::swap(list[i], list[random.below(i + 1)]);
}

// Every rank sends to all others, in any order, and asks for what it gets in any other order.
void exchange(Crew& crew, int rank, Random random, int num_tags) {
    pt_group* group = crew.groups[rank];
    std::vector<int64_t> lengths; // of each tag's message, the same for all
    for (int tag = 0; tag < num_tags; ++tag) lengths.push_back(random.below((tag % 4 ? 4 : 20) * PART_BYTES));
    lengths[1] = 0;
    Random own{random.next() + static_cast<uint64_t>(rank)};
    std::vector<Message> sends, receives;
    for (int peer = 0; peer < crew.size; ++peer)
        for (int tag = 0; tag < num_tags && peer != rank; ++tag) {
            sends.push_back({peer, tag, text(rank, peer, tag, lengths[tag]), lengths[tag], nullptr});
            receives.push_back({peer, tag, std::vector<char>(lengths[tag] + 1), lengths[tag], nullptr});
        }
    shuffle(sends, own);
    shuffle(receives, own);
    for (size_t i = 0; i < sends.size(); ++i) {
        Message& send = sends[i];
        Message& receive = receives[i];
        send.transfer = pt_send(group, send.peer, send.tag, 5, send.bytes.data(), send.num_bytes);
        receive.transfer = pt_receive(group, receive.peer, receive.tag, 5, receive.bytes.data(), receive.num_bytes);
        if (i % 4 == 3) pt_transfer_done(group, receives[i - 2].transfer);
    }
    for (Message& receive : receives) {
        CHECK(pt_transfer_wait(group, receive.transfer, LONG_S) == pt::FINE);
        CHECK(receive.bytes == text(receive.peer, rank, receive.tag, receive.num_bytes));
        pt_transfer_free(group, receive.transfer);
    }
    for (Message& send : sends) {
        CHECK(pt_transfer_wait(group, send.transfer, LONG_S) == pt::FINE);
        pt_transfer_free(group, send.transfer);
    }
}

void everybody_to_everybody(Random& random, int size, bool helped) {
    Crew crew(size, 1024, RING_BYTES, 64);
    const uint64_t seed = random.next();
    crew.run([&](int rank) {
        std::atomic<bool> over{false};
        std::thread helper([&] {
            while (helped && !over) pt_transfers_serve(crew.groups[rank], 0.001);
        });
        for (int round = 0; round < 3; ++round) exchange(crew, rank, Random{seed + round}, 12);
        over = true;
        helper.join();
        CHECK(pt_barrier(crew.groups[rank], LONG_S) == 0);
    });
}

int32_t finished(pt_group* group, pt_transfer* transfer, double timeout_s) {
    const int32_t status = pt_transfer_wait(group, transfer, timeout_s);
    pt_transfer_free(group, transfer);
    return status;
}

int32_t sent(pt_group* group, int to, int tag, const std::vector<char>& bytes, double timeout_s = LONG_S) {
    const auto num_bytes = static_cast<int64_t>(bytes.size());
    return finished(group, pt_send(group, to, tag, 5, bytes.data(), num_bytes), timeout_s);
}

int32_t received(pt_group* group, int source, int tag, std::vector<char>& bytes, double timeout_s = LONG_S) {
    const auto num_bytes = static_cast<int64_t>(bytes.size());
    return finished(group, pt_receive(group, source, tag, 5, bytes.data(), num_bytes), timeout_s);
}

void from_anyone() {
    Crew crew(4, 1024, RING_BYTES, 64);
    crew.run([&](int rank) {
        pt_group* group = crew.groups[rank];
        if (rank != 0) {
            CHECK(sent(group, 0, 9, text(rank, 0, 9, 3000)) == pt::FINE);
            return;
        }
        int came = 0;
        for (int i = 0; i < 3; ++i) {
            std::vector<char> bytes(3001);
            pt_transfer* transfer = pt_receive(group, -1, 9, 5, bytes.data(), 3001);
            CHECK(pt_transfer_wait(group, transfer, LONG_S) == pt::FINE);
            const int peer = pt_transfer_peer(transfer);
            CHECK(bytes == text(peer, 0, 9, 3000));
            came |= 1 << peer;
            pt_transfer_free(group, transfer);
        }
        CHECK(came == (1 << 1 | 1 << 2 | 1 << 3));
    });
}

// A receive that expects another length is told, and what comes after it is not disturbed.
void another_length() {
    Crew crew(2, 1024, RING_BYTES, 64);
    crew.run([&](int rank) {
        pt_group* group = crew.groups[rank];
        std::vector<char> wrong(1999), right(2001);
        if (rank == 0) {
            CHECK(sent(group, 1, 1, text(0, 1, 1, 2000)) == pt::FINE);
            CHECK(sent(group, 1, 2, text(0, 1, 2, 2000)) == pt::FINE);
        } else {
            CHECK(received(group, 0, 1, wrong) == pt::MISMATCH);
            CHECK(received(group, 0, 2, right) == pt::FINE);
            CHECK(right == text(0, 1, 2, 2000));
        }
    });
}

// 1 the sender gives up a long message of which a part lies in the ring
// 2 the receiver takes the part: for a receive that waits for it, or aside, for it wants what is behind
// 3 the sender sends another one: now the receiver knows, and never takes the part for the whole
void given_up_half_way(bool aside) {
    Crew crew(2, 1024, RING_BYTES, 64);
    crew.run([&](int rank) {
        pt_group* group = crew.groups[rank];
        std::vector<char> whole(20 * PART_BYTES), other(101);
        if (rank == 0) {
            CHECK(sent(group, 1, 1, whole, 0.02) == pt::LATE);
            CHECK(pt_barrier(group, LONG_S) == pt::FINE);
            CHECK(sent(group, 1, 2, text(0, 1, 2, 100)) == pt::FINE);
        } else {
            CHECK(pt_barrier(group, LONG_S) == pt::FINE);
            pt_transfer* first = aside ? nullptr : pt_receive(group, 0, 1, 5, whole.data(), 20 * PART_BYTES);
            CHECK(received(group, 0, 2, other) == pt::FINE);
            CHECK(other == text(0, 1, 2, 100));
            CHECK((aside ? received(group, 0, 1, whole, 0.05) : finished(group, first, LONG_S)) == pt::LATE);
        }
        CHECK(pt_barrier(group, LONG_S) == pt::FINE);
    });
}

// A message that fits in its ring is over before it is asked for, wherever in the ring the last one has ended.
void sent_at_once() {
    Crew crew(2, 1024, RING_BYTES, 64);
    crew.run([&](int rank) {
        pt_group* group = crew.groups[rank];
        for (int64_t num_bytes = 0; num_bytes <= 2 * PART_BYTES; num_bytes += 37) {
            const std::vector<char> expected = text(0, 1, 1, num_bytes);
            std::vector<char> bytes(expected.size());
            if (rank == 0) CHECK(sent(group, 1, 1, expected, 0) == pt::FINE);
            CHECK(pt_barrier(group, LONG_S) == pt::FINE);
            if (rank == 1) CHECK(received(group, 0, 1, bytes) == pt::FINE && bytes == expected);
            CHECK(pt_barrier(group, LONG_S) == pt::FINE);
        }
    });
}

// A message that does not fit comes while neither program waits for it: each server is called when it is its turn. The
// rest, which the sender has no reason to call for, lies in the ring until it is asked for.
void served() {
    Crew crew(2, 1024, RING_BYTES, 64);
    std::atomic<bool> here{false};
    crew.run([&](int rank) {
        pt_group* group = crew.groups[rank];
        const std::vector<char> sent = text(0, 1, 1, 20 * PART_BYTES);
        std::vector<char> bytes(sent.size());
        const auto num_bytes = static_cast<int64_t>(sent.size());
        pt_transfer* transfer = rank == 0 ? pt_send(group, 1, 1, 5, sent.data(), num_bytes)
                                          : pt_receive(group, 0, 1, 5, bytes.data(), num_bytes);
        const int64_t late_ns = pt::deadline_after(LONG_S);
        while (rank == 0 ? !here.load() : !std::equal(sent.begin(), sent.end() - RING_BYTES, bytes.begin())) {
            pt_transfers_serve(group, rank == 0 ? 0.01 : LONG_S);
            CHECK(pt::now_ns() < late_ns);
        }
        here = true;
        CHECK(finished(group, transfer, LONG_S) == pt::FINE);
        CHECK(rank == 0 || bytes == sent);
    });
}

// What was sent before the sender left still comes; what was not is lost, whether one waits or asks.
void sender_leaves() {
    Crew crew(2, 1024, RING_BYTES, 64);
    crew.run([&](int rank) {
        pt_group* group = crew.groups[rank];
        if (rank == 0) {
            CHECK(sent(group, 1, 1, text(0, 1, 1, 500)) == pt::FINE);
            pt_group_leave(group);
            return;
        }
        std::vector<char> bytes(501), none(10);
        CHECK(received(group, 0, 1, bytes) == pt::FINE);
        CHECK(bytes == text(0, 1, 1, 500));
        CHECK(received(group, 0, 2, none) == pt::LOST);
        CHECK(sent(group, 0, 3, std::vector<char>(20 * PART_BYTES)) == pt::LOST);
        pt_transfer* polled = pt_receive(group, 0, 4, 5, none.data(), 10);
        while (!pt_transfer_done(group, polled)) std::this_thread::yield();
        CHECK(finished(group, polled, LONG_S) == pt::LOST);
    });
}

} // namespace

int main(int count, char** arguments) {
    Random random{seed_from(count, arguments)};
    for (int size = 2; size <= 5; ++size) everybody_to_everybody(random, size, size % 2 == 0);
    from_anyone();
    another_length();
    given_up_half_way(false);
    given_up_half_way(true);
    sent_at_once();
    served();
    sender_leaves();
}
