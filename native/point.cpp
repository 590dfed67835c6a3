// Send and receive. Each rank has a ring (ring.h) for every other rank in its own arena, where that rank leaves frames.
//
// A message whose tag nobody has asked for waits in the ring; when something behind it is asked for, it is set aside in
// private memory. A message that fits in the ring is sent at once. Another one is held up until its receiver has made
// room, and the ring says so (`held`): then each of the two asks the other one's server (pt_transfers_serve), a thread
// that sleeps until then, to do its part, for their programs may be busy elsewhere.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <pthread.h>

#include "group.h"
#include "kernels.h"
#include "polytempo.h"
#include "ring.h"

struct pt_transfer {
    bool sends, done;
    int peer; // -1: from any rank, until one is found
    int tag, dtype;
    char* data;
    int64_t num_bytes, moved_bytes; // moved: of what is sent
    pt::Status status;
    int64_t arrived_bytes; // what was sent, where that is not what was asked for
    int arrived_dtype;
    pt_transfer* next;
};

namespace pt {

constexpr int64_t GRACE_NS = 2'000'000; // how long a server leaves it to its program to see to a message
constexpr int64_t MAX_ASIDE_BYTES = 1LL << 30; // of messages set aside; beyond it they wait in the ring

struct Aside { // a message that came before it was asked for
    int tag, dtype;
    int64_t num_bytes, moved_bytes;
    char* data;
    Aside* next;
};

struct Incoming {        // what is arriving from one rank
    pt_transfer* target; // null while a message is set aside or dropped
    Aside* aside;        // the one under way
    Aside* kept;         // all that were set aside, the oldest first
};

struct Points {
    pthread_mutex_t lock;
    RingSizes sizes;
    uint32_t answered; // the last call for help that the server has answered; only it looks
    pt_transfer** sends; // by destination, the oldest first
    pt_transfer* receives;
    Incoming* incoming; // by source
    int64_t aside_bytes;
};

static Ring& ring_of(const Group& group, int receiver, int sender) {
    return *reinterpret_cast<Ring*>(group.rings[receiver] + sender * group.points->sizes.stride());
}

static void ring_bell(Group& group, int rank) {
    Member& member = group.member(rank);
    // seq_cst, as in arrive(): no sleeper is missed.
    member.bell.fetch_add(1, std::memory_order_seq_cst);
    if (member.bell_sleepers.load(std::memory_order_seq_cst)) wake(member.bell);
}

static void call_server(Group& group, int rank) {
    Member& member = group.member(rank);
    member.calls_for_help.fetch_add(1, std::memory_order_seq_cst); // seq_cst, as in ring_bell
    if (member.server_sleeps.load(std::memory_order_seq_cst)) wake(member.calls_for_help);
}

template <typename Node> static void append(Node*& list, Node* node) {
    Node** end = &list;
    while (*end) end = &(*end)->next;
    *end = node;
}

template <typename Node> static void take_out(Node*& list, Node* node) {
    Node** place = &list;
    while (*place && *place != node) place = &(*place)->next;
    if (*place) *place = node->next;
    node->next = nullptr;
}

static void finish(pt_transfer& transfer, Status status) {
    transfer.done = true;
    transfer.status = status;
}

// ------------------------------------------------------------------------------------------------------- sending

// As RingSizes::room_for; where there is none, the receiver is told that this rank waits for it.
static int64_t room_or_hold(Group& group, Ring& ring, int to, uint64_t head, int64_t wanted) {
    const int64_t left_out = group.points->sizes.room_for(ring, head, wanted);
    if (left_out >= 0 || ring.held.exchange(1, std::memory_order_seq_cst)) return left_out;
    // seq_cst: either the receiver sees `held` after it has made room, or the room is seen here.
    const int64_t now = group.points->sizes.room_for(ring, head, wanted);
    if (now >= 0)
        ring.held.store(0, std::memory_order_relaxed);
    else
        call_server(group, to);
    return now;
}

static bool push(Group& group, int to) {
    Points& points = *group.points;
    Ring& ring = ring_of(group, to, group.rank);
    bool moved = false;
    while (pt_transfer* transfer = points.sends[to]) {
        uint64_t head = ring.head.load(std::memory_order_relaxed); // only this rank writes it
        const int64_t part = std::min(points.sizes.part_bytes, transfer->num_bytes - transfer->moved_bytes);
        const int64_t left_out = room_or_hold(group, ring, to, head, frame_bytes(part));
        if (left_out < 0) break;
        if (left_out) points.sizes.frame_at(ring, points.sizes.place_of(head)).offset = GO_TO_BEGIN;
        head += left_out;
        Frame& frame = points.sizes.frame_at(ring, points.sizes.place_of(head));
        frame = Frame{transfer->num_bytes, transfer->moved_bytes, part, transfer->tag, transfer->dtype, {}};
        if (part) copy(payload(frame), transfer->data + transfer->moved_bytes, part);
        transfer->moved_bytes += part;
        ring.head.store(head + frame_bytes(part), std::memory_order_release); // the frame is there before it is counted
        ring_bell(group, to);
        moved = true;
        if (transfer->moved_bytes == transfer->num_bytes) {
            take_out(points.sends[to], transfer);
            finish(*transfer, FINE);
        }
    }
    return moved;
}

// ------------------------------------------------------------------------------------------------------ receiving

static bool fits(pt_transfer& transfer, int64_t num_bytes, int dtype) {
    transfer.arrived_bytes = num_bytes;
    transfer.arrived_dtype = dtype;
    return num_bytes == transfer.num_bytes && dtype == transfer.dtype;
}

static void forget(Points& points, Incoming& incoming, Aside* aside) {
    take_out(incoming.kept, aside);
    if (incoming.aside == aside) incoming.aside = nullptr;
    points.aside_bytes -= aside->num_bytes;
    std::free(aside->data);
    std::free(aside);
}

// A message begins before the last one is complete: its sender has given that up, and nobody may take a part for it.
static void abandon(Points& points, Incoming& incoming) {
    if (incoming.target) finish(*incoming.target, LATE);
    if (incoming.aside) forget(points, incoming, incoming.aside);
    incoming.target = nullptr;
}

// Who is the message that begins with `frame` for? False: for nobody yet, so it has to wait.
static bool begin_message(Points& points, Incoming& incoming, int source, const Frame& frame) {
    bool wanted = false; // does anyone wait for something from this rank?
    for (pt_transfer* transfer = points.receives; transfer; transfer = transfer->next) {
        if (transfer->peer >= 0 && transfer->peer != source) continue;
        wanted = true;
        if (transfer->tag != frame.tag) continue;
        take_out(points.receives, transfer);
        transfer->peer = source;
        if (fits(*transfer, frame.total_bytes, frame.dtype))
            incoming.target = transfer;
        else
            finish(*transfer, MISMATCH);
        return true;
    }
    if (!wanted || points.aside_bytes + frame.total_bytes > MAX_ASIDE_BYTES) return false;
    auto* data = static_cast<char*>(std::malloc(frame.total_bytes + 1));
    if (!data) return false; // no memory now: it waits in the ring
    auto* aside = static_cast<Aside*>(std::calloc(1, sizeof(Aside)));
    *aside = Aside{frame.tag, frame.dtype, frame.total_bytes, 0, data, nullptr};
    points.aside_bytes += frame.total_bytes;
    append(incoming.kept, aside);
    incoming.aside = aside;
    return true;
}

// What is before `tail` has been read: its place is the sender's again.
static void give_back(Group& group, Ring& ring, int source, uint64_t tail) {
    ring.tail.store(tail, std::memory_order_seq_cst); // seq_cst, as in room_or_hold
    if (ring.held.load(std::memory_order_seq_cst) && ring.held.exchange(0, std::memory_order_seq_cst))
        call_server(group, source);
    ring_bell(group, source);
}

static bool pull(Group& group, int source) {
    Points& points = *group.points;
    Incoming& incoming = points.incoming[source];
    Ring& ring = ring_of(group, group.rank, source);
    bool moved = false;
    while (true) {
        uint64_t tail = ring.tail.load(std::memory_order_relaxed); // only this rank writes it
        if (ring.head.load(std::memory_order_acquire) == tail) break;
        const int64_t place = points.sizes.place_of(tail);
        const bool goes_to_begin = points.sizes.frame_at(ring, place).offset == GO_TO_BEGIN; // what is counted ends with a frame
        if (goes_to_begin) tail += points.sizes.room_bytes - place;
        Frame& frame = points.sizes.frame_at(ring, goes_to_begin ? 0 : place);
        if (frame.offset == 0) abandon(points, incoming);
        if (frame.offset == 0 && !begin_message(points, incoming, source, frame)) break;
        char* data = incoming.target ? incoming.target->data : incoming.aside ? incoming.aside->data : nullptr;
        if (data && frame.num_bytes)
            (frame.total_bytes < LARGE_BYTES ? copy : copy_past_caches)(
                data + frame.offset, payload(frame), frame.num_bytes);
        if (incoming.aside) incoming.aside->moved_bytes = frame.offset + frame.num_bytes;
        const bool last = frame.offset + frame.num_bytes == frame.total_bytes;
        give_back(group, ring, source, tail + frame_bytes(frame.num_bytes));
        moved = true;
        if (last) {
            if (incoming.target) finish(*incoming.target, FINE);
            incoming.target = nullptr;
            incoming.aside = nullptr;
        }
    }
    return moved;
}

// A message that was set aside earlier, for a receive that has just been asked for.
static bool from_aside(Points& points, pt_transfer& transfer, int source) {
    Incoming& incoming = points.incoming[source];
    for (Aside* aside = incoming.kept; aside; aside = aside->next) {
        if (aside->tag != transfer.tag) continue;
        transfer.peer = source;
        const bool under_way = incoming.aside == aside;
        if (!fits(transfer, aside->num_bytes, aside->dtype)) {
            finish(transfer, MISMATCH);
        } else {
            if (aside->moved_bytes) copy(transfer.data, aside->data, aside->moved_bytes);
            if (under_way)
                incoming.target = &transfer;
            else
                finish(transfer, FINE);
        }
        forget(points, incoming, aside);
        return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------------- progress

static bool advance(Group& group) {
    bool moved = false;
    for (int rank = 0; rank < group.size; ++rank) {
        if (rank == group.rank) continue;
        if (group.points->sends[rank]) moved |= push(group, rank);
        moved |= pull(group, rank);
    }
    return moved;
}

static bool hopeless(const Group& group, const pt_transfer& transfer) {
    if (transfer.peer >= 0) return is_gone(group, transfer.peer);
    for (int rank = 0; rank < group.size; ++rank)
        if (rank != group.rank && !is_gone(group, rank)) return false;
    return true;
}

static void give_up(Group& group, pt_transfer& transfer, Status status) {
    Points& points = *group.points;
    if (transfer.sends)
        take_out(points.sends[transfer.peer], &transfer);
    else
        take_out(points.receives, &transfer);
    for (int rank = 0; rank < group.size; ++rank) // what still comes of a message under way is dropped
        if (points.incoming[rank].target == &transfer) points.incoming[rank].target = nullptr;
    finish(transfer, status);
}

// Give up what is late, or cannot come any more. What the other sent before it was gone still counts.
static bool ended(Group& group, pt_transfer& transfer, bool late) {
    const bool gone = hopeless(group, transfer);
    if (!gone && !late) return false;
    advance(group);
    if (!transfer.done) give_up(group, transfer, gone ? LOST : LATE);
    return true;
}

struct Locked {
    pthread_mutex_t& lock;
    explicit Locked(Points& points) : lock(points.lock) { pthread_mutex_lock(&lock); }
    ~Locked() { pthread_mutex_unlock(&lock); }
};

// Advance everything until `finished()`, which is asked under the lock. `idle()` is asked after each slice of sleep.
template <typename Finished, typename Idle> static void advance_until(Group& group, Finished finished, Idle idle) {
    Member& me = group.member(group.rank);
    Patience patience(group);
    while (true) {
        const uint32_t seen = me.bell.load(std::memory_order_acquire);
        {
            Locked locked(*group.points);
            const bool moved = advance(group);
            if (finished()) return;
            if (moved) patience = Patience(group);
        }
        if (!patience.exhausted()) continue;
        me.bell_sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (me.bell.load(std::memory_order_seq_cst) == seen) sleep_on(me.bell, seen, SLICE_NS);
        me.bell_sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (idle()) return;
    }
}

Points* open_points(const Group& group, int64_t ring_bytes) {
    auto* points = static_cast<Points*>(std::calloc(1, sizeof(Points)));
    pthread_mutex_init(&points->lock, nullptr);
    points->sizes = sizes_of(ring_bytes);
    points->sends = static_cast<pt_transfer**>(std::calloc(group.size, sizeof(pt_transfer*)));
    points->incoming = static_cast<Incoming*>(std::calloc(group.size, sizeof(Incoming)));
    return points;
}

void close_points(const Group& group) {
    Points* points = group.points;
    for (int rank = 0; rank < group.size; ++rank)
        while (Aside* aside = points->incoming[rank].kept) forget(*points, points->incoming[rank], aside);
    pthread_mutex_destroy(&points->lock);
    std::free(points->sends);
    std::free(points->incoming);
    std::free(points);
}

} // namespace pt

using namespace pt;

int64_t pt_rings_bytes(int32_t size, int64_t ring_bytes) { return size * sizes_of(ring_bytes).stride(); }

static pt_transfer* made(bool sends, int peer, int tag, int dtype, void* data, int64_t num_bytes) {
    auto* transfer = static_cast<pt_transfer*>(std::calloc(1, sizeof(pt_transfer)));
    transfer->sends = sends;
    transfer->peer = peer;
    transfer->tag = tag;
    transfer->dtype = dtype;
    transfer->data = static_cast<char*>(data);
    transfer->num_bytes = num_bytes;
    return transfer;
}

pt_transfer* pt_send(pt_group* handle, int32_t to, int32_t tag, int32_t dtype, const void* data, int64_t num_bytes) {
    auto& group = *reinterpret_cast<Group*>(handle);
    Locked locked(*group.points);
    pt_transfer* transfer = made(true, to, tag, dtype, const_cast<void*>(data), num_bytes);
    append(group.points->sends[to], transfer);
    push(group, to);
    return transfer;
}

pt_transfer* pt_receive(pt_group* handle, int32_t source, int32_t tag, int32_t dtype, void* data, int64_t num_bytes) {
    auto& group = *reinterpret_cast<Group*>(handle);
    Points& points = *group.points;
    Locked locked(points);
    pt_transfer* transfer = made(false, source, tag, dtype, data, num_bytes);
    for (int rank = 0; rank < group.size; ++rank)
        if ((source < 0 || source == rank) && from_aside(points, *transfer, rank)) return transfer;
    append(points.receives, transfer);
    for (int rank = 0; rank < group.size; ++rank)
        if (rank != group.rank && (source < 0 || source == rank)) pull(group, rank);
    return transfer;
}

int32_t pt_transfer_done(pt_group* handle, pt_transfer* transfer) {
    auto& group = *reinterpret_cast<Group*>(handle);
    Locked locked(*group.points);
    if (!transfer->done) advance(group);
    if (!transfer->done) ended(group, *transfer, false); // who asks again and again has to be told, too
    return transfer->done;
}

int32_t pt_transfer_wait(pt_group* handle, pt_transfer* transfer, double timeout_s) {
    auto& group = *reinterpret_cast<Group*>(handle);
    const int64_t deadline_ns = deadline_after(timeout_s);
    advance_until(
        group, [&] { return transfer->done; },
        [&] { // under the lock, for another thread may be just finding out who the peer is
            Locked locked(*group.points);
            return ended(group, *transfer, now_ns() > deadline_ns);
        });
    return transfer->status;
}

void pt_transfers_serve(pt_group* handle, double timeout_s) {
    auto& group = *reinterpret_cast<Group*>(handle);
    Member& me = group.member(group.rank);
    Points& points = *group.points;
    const int64_t deadline_ns = deadline_after(timeout_s);
    uint32_t calls;
    while ((calls = me.calls_for_help.load(std::memory_order_acquire)) == points.answered) {
        const int64_t left_ns = deadline_ns - now_ns();
        if (left_ns <= 0) return;
        me.server_sleeps.fetch_add(1, std::memory_order_seq_cst);
        if (me.calls_for_help.load(std::memory_order_seq_cst) == calls) sleep_on(me.calls_for_help, calls, left_ns);
        me.server_sleeps.fetch_sub(1, std::memory_order_relaxed);
    }
    points.answered = calls;
    std::atomic<uint32_t> nobody{0};
    sleep_on(nobody, 0, GRACE_NS);
    Locked locked(points);
    advance(group);
}

void pt_transfers_wake(pt_group* handle) {
    auto& group = *reinterpret_cast<Group*>(handle);
    call_server(group, group.rank);
}

int32_t pt_transfer_peer(pt_transfer* transfer) { return transfer->peer; }
int64_t pt_transfer_arrived_bytes(pt_transfer* transfer) { return transfer->arrived_bytes; }
int32_t pt_transfer_arrived_dtype(pt_transfer* transfer) { return transfer->arrived_dtype; }

void pt_transfer_free(pt_group* handle, pt_transfer* transfer) {
    auto& group = *reinterpret_cast<Group*>(handle);
    {
        Locked locked(*group.points);
        if (!transfer->done) give_up(group, *transfer, BROKEN);
    }
    std::free(transfer);
}
