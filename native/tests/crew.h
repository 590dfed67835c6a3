// Ranks that are threads of one process, each with an arena of its own allocation, laid out as the Python face does.
//
//   arena of a rank    staging │ rings │ control (rank 0) │ data
//
// So the sanitizers see all that ranks do to each other, which they cannot between processes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <unistd.h>

#include "group.h"
#include "polytempo.h"

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                              \
            std::abort();                                                                                             \
        }                                                                                                             \
    } while (false)

constexpr double LONG_S = 60; // nothing here takes that long

// The same numbers on every rank from the same seed (splitmix64: G. Steele, D. Lea, C. Flood, 2014).
struct Random {
    uint64_t state;

    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }
};

inline uint64_t seed_from(int count, char** arguments) {
    const uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    return seed;
}

// One group of `size` ranks. Several crews are several groups.
struct Crew {
    int size;
    std::vector<void*> arenas, staging, rings, data;
    std::vector<pt_group*> groups;

    Crew(int ranks, int64_t block_bytes, int64_t ring_bytes, int64_t data_bytes) : size(ranks) {
        const int64_t rings_bytes = (pt_rings_bytes(size, ring_bytes) + 63) / 64 * 64;
        const int64_t before = 4 * block_bytes + rings_bytes, control_bytes = pt_control_bytes(size);
        const int64_t arena_bytes = (before + control_bytes + data_bytes + 63) / 64 * 64;
        for (int rank = 0; rank < size; ++rank) {
            char* arena = static_cast<char*>(std::aligned_alloc(64, arena_bytes));
            std::memset(arena, 0, arena_bytes);
            arenas.push_back(arena);
            staging.push_back(arena);
            rings.push_back(arena + 4 * block_bytes);
            data.push_back(arena + before + control_bytes);
        }
        const std::vector<int32_t> no_pidfds(size, -1);
        for (int rank = 0; rank < size; ++rank) {
            pt_group_place place{rank, size, getpid(), 2, static_cast<char*>(arenas[0]) + before, arenas.data(),
                                 staging.data(), rings.data(), no_pidfds.data(), arena_bytes, block_bytes, ring_bytes};
            groups.push_back(pt_group_open(&place));
        }
    }

    ~Crew() {
        for (pt_group* group : groups) pt_group_close(group);
        for (void* arena : arenas) std::free(arena);
    }

    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    template <typename Work> void run(Work work) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; ++rank) threads.emplace_back([&work, rank] { work(rank); });
        for (std::thread& thread : threads) thread.join();
    }
};
