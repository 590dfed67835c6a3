// Random collectives of 1 to 5 ranks, one after the other without a pause, and of several groups at once.
//
// All ranks draw the same plan from the same seed. Each lets its data lie in its arena or elsewhere as it likes, checks
// every element of what it got, and overwrites its data at once: who would still read them would be found out.
#include <algorithm>

#include "crew.h"
#include "kernels.h"

namespace {

constexpr int64_t HALF_BYTES = 256 << 10; // a rank's data: what it gives, and what it gets
constexpr pt::DType DTYPES[] = {pt::F32, pt::F64, pt::I32, pt::U8, pt::I64};
constexpr pt::Op OPS[] = {pt::SUM, pt::MIN, pt::MAX};

// Small whole numbers, exact in every type, sums of five as well.
int64_t value(int64_t round, int rank, int64_t index) { return (round * 7 + rank * 13 + index * 5) % 47; }

void put(char* at, pt::DType dtype, int64_t number) {
    switch (dtype) {
    case pt::F32: { const auto v = static_cast<float>(number); std::memcpy(at, &v, 4); break; }
    case pt::F64: { const auto v = static_cast<double>(number); std::memcpy(at, &v, 8); break; }
    case pt::I32: { const auto v = static_cast<int32_t>(number); std::memcpy(at, &v, 4); break; }
    case pt::U8: *reinterpret_cast<uint8_t*>(at) = static_cast<uint8_t>(number); break;
    default: std::memcpy(at, &number, 8);
    }
}

void fill(char* at, pt::DType dtype, int64_t count, int64_t round, int rank, int64_t first = 0) {
    const auto width = static_cast<int64_t>(pt::bytes_of(dtype));
    for (int64_t i = 0; i < count; ++i) put(at + i * width, dtype, value(round, rank, first + i));
}

struct Plan {
    pt::Kind kind;
    pt::DType dtype;
    pt::Op op;
    pt::Order order;
    int root;
    int64_t count;
    uint64_t places; // bit r: rank r's data lie in its arena

    Plan(Random& random, int size, int64_t block_bytes) {
        kind = pt::Kind(random.below(pt::ALL_TO_ALL + 1));
        dtype = DTYPES[random.below(5)];
        op = OPS[random.below(3)];
        order = pt::Order(random.below(2));
        root = static_cast<int>(random.below(size));
        const int64_t width = static_cast<int64_t>(pt::bytes_of(dtype)), most = HALF_BYTES / width / (size + 1);
        const int64_t counts[] = {0, 1, random.below(70), block_bytes / width + random.below(3) - 1,
                                  random.below(3000), random.below(most)};
        count = std::min(counts[random.below(6)], most);
        const uint64_t choices[] = {0, ~0ULL, random.next()};
        places = choices[random.below(3)];
    }
};

struct Rank {
    Crew& crew;
    int rank;
    std::vector<char> heap = std::vector<char>(2 * HALF_BYTES);
    std::vector<char> expected = std::vector<char>(HALF_BYTES);

    // An odd place now and then: no pointer needs to be aligned to more than its elements.
    char* gives(const Plan& plan, int64_t round) {
        char* begin = plan.places >> rank & 1 ? static_cast<char*>(crew.data[rank]) : heap.data();
        return begin + round % 3 * 8;
    }
    char* gets(const Plan& plan, int64_t round) { return gives(plan, round) + HALF_BYTES - 64; }

    void reduced(const Plan& plan, int64_t round, int64_t first) {
        const auto width = static_cast<int64_t>(pt::bytes_of(plan.dtype));
        for (int64_t i = 0; i < plan.count; ++i) {
            int64_t result = value(round, 0, first + i);
            for (int other = 1; other < crew.size; ++other) {
                const int64_t next = value(round, other, first + i);
                result = plan.op == pt::SUM ? result + next
                       : plan.op == pt::MIN ? std::min(result, next) : std::max(result, next);
            }
            put(&expected[i * width], plan.dtype, result);
        }
    }

    void same(const char* found, const Plan& plan) const {
        CHECK(std::memcmp(found, expected.data(), plan.count * pt::bytes_of(plan.dtype)) == 0);
    }

    void all_reduce(const Plan& plan, int64_t round) {
        char* data = gives(plan, round);
        const int root = plan.kind == pt::REDUCE ? plan.root : -1;
        fill(data, plan.dtype, plan.count, round, rank);
        CHECK(pt_all_reduce(crew.groups[rank], plan.dtype, plan.op, plan.order, root, data, plan.count, 0, LONG_S) == 0);
        if (root < 0 || root == rank)
            reduced(plan, round, 0);
        else
            fill(expected.data(), plan.dtype, plan.count, round, rank);
        same(data, plan);
    }

    void reduce_scatter(const Plan& plan, int64_t round) {
        const auto width = static_cast<int64_t>(pt::bytes_of(plan.dtype));
        char* data = gives(plan, round);
        const void* inputs[8];
        for (int to = 0; to < crew.size; ++to) {
            char* piece = data + to * plan.count * width;
            fill(piece, plan.dtype, plan.count, round, rank, to * plan.count);
            inputs[to] = piece;
        }
        char* output = round % 2 ? gets(plan, round) : data + rank * plan.count * width; // apart, or in place
        CHECK(pt_reduce_scatter(
                  crew.groups[rank], plan.dtype, plan.op, plan.order, inputs, output, plan.count, 0, LONG_S) == 0);
        reduced(plan, round, rank * plan.count);
        same(output, plan);
    }

    // How much `from` sends to `to`: equal parts, but in an all-to-all all kinds of lengths.
    int64_t sent(const Plan& plan, int64_t round, int from, int to) const {
        if (plan.kind == pt::BROADCAST || plan.kind == pt::SCATTER) return from == plan.root ? plan.count : 0;
        if (plan.kind == pt::GATHER) return to == plan.root ? plan.count : 0;
        if (plan.kind == pt::ALL_GATHER) return plan.count;
        return plan.count * ((round + from * 3 + to) % 4) / 3;
    }

    void exchange(const Plan& plan, int64_t round) {
        const auto width = static_cast<int64_t>(pt::bytes_of(plan.dtype));
        const bool alike = plan.kind == pt::BROADCAST || plan.kind == pt::ALL_GATHER || plan.kind == pt::GATHER;
        const bool silent = (plan.kind == pt::BROADCAST || plan.kind == pt::SCATTER) && rank != plan.root;
        const int columns = silent ? 0 : alike ? 1 : crew.size;
        const void* sends[8] = {};
        void* receives[8] = {};
        int64_t send_bytes[8] = {}, receive_bytes[8] = {};
        char* from = gives(plan, round);
        for (int column = 0; column < columns; ++column) {
            const int64_t count = alike ? plan.count : sent(plan, round, rank, column);
            fill(from, plan.dtype, count, round, rank, alike ? 0 : column);
            sends[column] = from;
            send_bytes[column] = count * width;
            from += count * width;
        }
        char* to = gets(plan, round);
        for (int source = 0; source < crew.size; ++source) {
            receives[source] = to;
            receive_bytes[source] = sent(plan, round, source, rank) * width;
            to += receive_bytes[source];
        }
        const int64_t count = plan.kind == pt::ALL_TO_ALL ? 0 : plan.count;
        CHECK(pt_exchange(
                  crew.groups[rank], plan.kind, plan.dtype, plan.root, count, 0, columns, sends, send_bytes, receives,
                  receive_bytes, LONG_S) == 0);
        for (int source = 0; source < crew.size; ++source) {
            fill(expected.data(), plan.dtype, receive_bytes[source] / width, round, source, alike ? 0 : rank);
            CHECK(std::memcmp(receives[source], expected.data(), receive_bytes[source]) == 0);
        }
    }

    void work(Random random, int64_t num_rounds, int64_t block_bytes) {
        for (int64_t round = 0; round < num_rounds; ++round) {
            const Plan plan(random, crew.size, block_bytes);
            if (plan.kind == pt::BARRIER)
                CHECK(pt_barrier(crew.groups[rank], LONG_S) == 0);
            else if (plan.kind == pt::ALL_REDUCE || plan.kind == pt::REDUCE)
                all_reduce(plan, round);
            else if (plan.kind == pt::REDUCE_SCATTER)
                reduce_scatter(plan, round);
            else
                exchange(plan, round);
            std::memset(gives(plan, round), 0xee, 4096); // ours again
        }
    }
};

void one_group(uint64_t seed, int size, int64_t block_bytes, int64_t num_rounds) {
    Crew crew(size, block_bytes, 256, 2 * HALF_BYTES);
    crew.run([&](int rank) { Rank{crew, rank}.work(Random{seed}, num_rounds, block_bytes); });
}

} // namespace

int main(int count, char** arguments) {
    const uint64_t seed = seed_from(count, arguments);
    for (int size = 1; size <= 5; ++size) {
        one_group(seed, size, 1024, 200);
        one_group(seed + 1, size, 16 << 10, 200);
    }
    std::thread first([seed] { one_group(seed + 2, 2, 4096, 200); });
    std::thread second([seed] { one_group(seed + 3, 3, 4096, 200); });
    first.join();
    second.join();
}
