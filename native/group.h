// Ranks of one host that meet in shared memory.
//
//   control block (in the arena of the group's first rank, zero at the beginning)
//   ┌ Member 0 ───────────────────────────────────────────────┬ Member 1 ─ … ─┐
//   │ phase  sleepers  state │ bell … │ calls[2] │ lengths[2][…] │               │
//   └──────────────────────────────────────────────────────────┴───────────────┘
//   staging (in each rank's own arena)                 rings (in each rank's own arena)
//   ┌ in[0] ─┬ in[1] ─┬ out[0] ─┬ out[1] ─┐             ┌ from rank 0 ─┬ from rank 1 ─ … ─┐
//
// `phase` counts how many times a rank has arrived. To meet is to arrive, and then to wait until everybody has
// arrived as often. Whatever a rank wrote before it arrived, the others may read after they have waited.
//
// A slot of the staging is chosen by `turn`, a count of blocks that all ranks share without talking about it, since
// all run the same calls. A slot is written again two turns later, after a meeting that no rank passes before all
// have finished reading it. So no call needs a meeting at its end just to give its slots back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pt {

enum Status : int32_t { FINE = 0, LOST = 1, LATE = 2, MISMATCH = 3, BROKEN = 4 };
// LEFT: will not come again. CLOSED: does not touch shared memory any more, so its peers may give theirs back.
enum State : uint32_t { HERE = 0, LEFT = 1, CLOSED = 2 };

enum Kind : int32_t {
    BARRIER = 0, ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, STEP,
};

// What a rank says that it is doing. The first 48 bytes must be the same on every rank.
struct Call {
    uint64_t number;
    int32_t kind, dtype, op, root;
    int64_t count;   // elements, as the caller counts them
    int64_t extra;   // what else has to agree (the order of addition, a hash of a plan)
    int64_t form;    // what the caller says of the data besides: its shape
    int64_t place;   // 1 + offset of the data in this rank's arena; 0: elsewhere
    int64_t lengths; // how many of `lengths` are in use
};
constexpr size_t COMPARED_BYTES = 48;
constexpr int MAX_RANKS = 1024;

struct alignas(64) Member {
    std::atomic<uint32_t> phase; // the word that others sleep on
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> state;
    std::atomic<int32_t> pid; // 0 until it has opened the group
    alignas(64) std::atomic<uint32_t> bell; // rung by those that send to this rank, or have received from it
    std::atomic<uint32_t> bell_sleepers;
    std::atomic<uint32_t> calls_for_help; // by those whose messages with this rank are held up
    std::atomic<uint32_t> server_sleeps;
    std::atomic<uint64_t> issued; // this rank's program has come to the call of that number, if not yet to doing it
    alignas(64) Call calls[2];
    // followed by int64_t lengths[2][2 * size]: bytes sent to, and expected from, each rank
};

struct Points; // point.cpp: sending and receiving
struct Group;
Points* open_points(const Group& group, int64_t ring_bytes);
void close_points(const Group& group);

struct Group {
    int rank, size;
    char* control;
    size_t member_bytes;
    char** arenas;  // where each rank's arena begins in this process
    char** staging; // each rank's
    char** rings;   // each rank's incoming rings
    int* pidfds;    // readable when a rank's process has ended; -1: ask by pid
    uint64_t arena_bytes;
    int64_t block_bytes; // of one slot
    int64_t spins;       // looks at a word before yielding the core
    int64_t yield_ns;    // how long to yield before sleeping
    uint32_t phase;
    uint64_t number; // calls begun
    uint64_t turn;   // blocks staged
    Status broken;   // why the group is of no use any more
    int culprit;     // the rank that is lost, late or different
    int expecting;   // of a mismatch in sizes, the rank that expects other than `culprit` sends; -1: none
    Points* points;

    Member& member(int rank) const { return *reinterpret_cast<Member*>(control + member_bytes * rank); }
    Call& call(int rank) const { return member(rank).calls[number & 1]; }
    int64_t* lengths(int rank) const {
        return reinterpret_cast<int64_t*>(&member(rank) + 1) + (number & 1) * 2 * size;
    }
    char* in(int rank, uint64_t turn) const { return staging[rank] + (turn & 1) * block_bytes; }
    char* out(int rank, uint64_t turn) const { return staging[rank] + (2 + (turn & 1)) * block_bytes; }
    char* at(int rank, int64_t place) const { return arenas[rank] + (place - 1); }
    int64_t place_of(const void* data, int64_t num_bytes) const;
};

int64_t now_ns();
int64_t deadline_after(double timeout_s); // a time of now_ns()

// Let the others know that this rank has come one phase further.
void arrive(Group& group);

// Wait until every rank has come as far as this one. `deadline_ns` is a time of now_ns().
// LOST: a rank whose process has ended, or that has left, has not arrived; all who wait find the same.
// LATE: the deadline is over. The group is broken afterwards.
Status wait_for_all(Group& group, int64_t deadline_ns);

inline Status meet(Group& group, int64_t deadline_ns) {
    arrive(group);
    return wait_for_all(group, deadline_ns);
}

// Begin a call: number it and say what it is. The description is compared by `agree` after the first meeting.
Call& describe(
    Group& group, Kind kind, int32_t dtype, int32_t op, int32_t root, int64_t count, int64_t extra, int64_t form = 0);
Status agree(Group& group);

// Whether the process of `rank` has ended, or it has left the group.
bool is_gone(const Group& group, int rank);
bool has_left(const Group& group, int rank);
bool has_ended(const Group& group, int rank);

// Wait until every rank has arrived or is gone, at most until the deadline.
void wait_for_living(const Group& group, int64_t deadline_ns);

// Sleep until `word` is no longer `seen`, at most `most_ns`; wake those that sleep on it.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int64_t most_ns);
void wake(std::atomic<uint32_t>& word);

// One look, politely: spin, then yield, then true when it is time to sleep.
struct Patience {
    int64_t spins_left, yield_ns, since_ns = 0;
    explicit Patience(const Group& group) : spins_left(group.spins), yield_ns(group.yield_ns) {}
    bool exhausted();
};

constexpr int64_t SLICE_NS = 50'000'000; // how long a rank sleeps before it asks whether the others are alive

} // namespace pt
