// The least that an all-reduce of f32 costs on this machine: nothing but the memory traffic, with the simplest
// hand-shake. What `polytempo bench` compares with. It asks nobody whether the others live or make the same call, and
// knows one type and one operation: it does less than any library may.
//
// A barrier: each rank has a line of its own, which counts how often it has arrived.
//
//   direct      barrier │ data[own slice] of every rank = Σ over ranks data[own slice] │ barrier
//   staged      for each block, staging[b & 1]; a slot is written again two blocks later, after a barrier that no
//               rank passes before all have finished reading it:
//     one shot  copy in │ barrier │ own data += all others' staging                        two ranks, or few bytes
//     two shot  copy in others' slices │ barrier │ add own slice, also into own staging │ barrier │ copy out others'
//
// The loops are plain: the compiler makes vectors of them, and the loader chooses a variant for this processor.
#include <sched.h>
#include <time.h>

#include <atomic>

#include "polytempo.h"

// A thread sanitizer is not yet awake when the loader chooses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define VARIANTS __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define VARIANTS
#endif
#if defined(__clang__)
#define NO_MEMCPY __attribute__((no_builtin("memcpy")))
#else
#define NO_MEMCPY __attribute__((optimize("no-tree-loop-distribute-patterns")))
#endif

extern "C" {

typedef struct {
    int32_t rank, size;
    int32_t spins;          // looks before the core is yielded: few where ranks outnumber cores
    int32_t block_count;    // elements of one of the two slots of a rank's staging
    void* lines;            // pt_limit_lines_bytes(size) bytes in shared memory, zero at the beginning
    void* const* data;      // each rank's, for direct
    void* const* staging;   // each rank's, of 2 * block_count elements, for staged
    int64_t arrivals;       // of this rank
    int64_t blocks;         // staged
    double timeout_s;       // for one wait
} pt_limit_place;

PT_EXPORT int64_t pt_limit_lines_bytes(int32_t size);

// Do it `calls` times, and write down the seconds of each. 0 fine, 1 too many ranks, 2 somebody did not come.
PT_EXPORT int32_t pt_limit_barrier(pt_limit_place* place, double* seconds, int64_t calls);
PT_EXPORT int32_t pt_limit_direct(pt_limit_place* place, int64_t count, double* seconds, int64_t calls);
PT_EXPORT int32_t pt_limit_staged(pt_limit_place* place, float* data, int64_t count, double* seconds, int64_t calls);
}

namespace {

constexpr int32_t FINE = 0, TOO_MANY = 1, LATE = 2;
constexpr int32_t MOST_RANKS = 64;
constexpr int64_t FEW_ELEMENTS = 4096; // up to here a second barrier costs more than adding everything everywhere
constexpr int32_t YIELDS_A_CLOCK = 256;

struct alignas(64) Line {
    std::atomic<int64_t> arrivals;
};

double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// The acquiring load makes visible what the other rank wrote before its releasing store.
bool wait_for(const std::atomic<int64_t>& word, int64_t wanted, int32_t spins, double timeout_s) {
    for (int32_t i = 0; i < spins; i++) {
        if (word.load(std::memory_order_acquire) >= wanted) return true;
        relax();
    }
    double late_s = 0;
    for (int32_t yields = 0; word.load(std::memory_order_acquire) < wanted; yields++) {
        sched_yield();
        if (yields % YIELDS_A_CLOCK) continue;
        if (!late_s) late_s = now_s() + timeout_s;
        if (now_s() > late_s) return false;
    }
    return true;
}

bool barrier(pt_limit_place& place) {
    Line* lines = static_cast<Line*>(place.lines);
    lines[place.rank].arrivals.store(++place.arrivals, std::memory_order_release);
    for (int32_t r = 0; r < place.size; r++)
        if (!wait_for(lines[r].arrivals, place.arrivals, place.spins, place.timeout_s)) return false;
    return true;
}

// A loop rather than memcpy, which on some processors copies by `rep movsb`, at a speed that depends on addresses.
NO_MEMCPY VARIANTS void copy(float* __restrict into, const float* __restrict a, int64_t count) {
    for (int64_t i = 0; i < count; i++) into[i] = a[i];
}

// into[i] += a[i]; the compiler knows that they do not overlap.
VARIANTS void add(float* __restrict into, const float* __restrict a, int64_t count) {
    for (int64_t i = 0; i < count; i++) into[i] += a[i];
}

VARIANTS void sum_2(float* __restrict a, float* __restrict b, int64_t count) {
    for (int64_t i = 0; i < count; i++) a[i] = b[i] = a[i] + b[i];
}

VARIANTS void sum_4(float* __restrict a, float* __restrict b, float* __restrict c, float* __restrict d, int64_t count) {
    for (int64_t i = 0; i < count; i++) a[i] = b[i] = c[i] = d[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

VARIANTS void sum_other_3(float* __restrict a, float* __restrict out, const float* __restrict b,
                         const float* __restrict c, const float* __restrict d, int64_t count) {
    for (int64_t i = 0; i < count; i++) a[i] = out[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

// Every rank's data[begin, end) becomes their sum.
void sum_everywhere(float* const* data, int32_t size, int64_t begin, int64_t end) {
    int64_t count = end - begin;
    if (size == 2) return sum_2(data[0] + begin, data[1] + begin, count);
    if (size == 4) return sum_4(data[0] + begin, data[1] + begin, data[2] + begin, data[3] + begin, count);
    constexpr int64_t PIECE = 2048; // stays in the first cache between the passes
    for (int64_t at = begin; at < end; at += PIECE) {
        int64_t piece = end - at < PIECE ? end - at : PIECE;
        for (int32_t r = 1; r < size; r++) add(data[0] + at, data[r] + at, piece);
        for (int32_t r = 1; r < size; r++) copy(data[r] + at, data[0] + at, piece);
    }
}

// data[i] += the other ranks' staging[i], and staging[own][i] = data[i].
void sum_staged(pt_limit_place& place, float* data, float* const* staging, int64_t count) {
    int32_t me = place.rank;
    if (place.size == 4)
        return sum_other_3(data, staging[me], staging[(me + 1) % 4], staging[(me + 2) % 4], staging[(me + 3) % 4], count);
    for (int32_t r = 0; r < place.size; r++)
        if (r != me) add(data, staging[r], count);
    copy(staging[me], data, count);
}

// Where a rank's part begins: on a cache line, so that no line has two writers.
int64_t edge(int64_t count, int32_t part, int32_t size) {
    return part == size ? count : count * part / size & ~int64_t(15);
}

bool one_shot(pt_limit_place& place, float* data, float* const* slots, int64_t count) {
    copy(slots[place.rank], data, count);
    if (!barrier(place)) return false;
    for (int32_t r = 0; r < place.size; r++)
        if (r != place.rank) add(data, slots[r], count);
    return true;
}

bool two_shot(pt_limit_place& place, float* data, float* const* slots, int64_t count) {
    int32_t me = place.rank, size = place.size;
    int64_t begin = edge(count, me, size), end = edge(count, me + 1, size);
    copy(slots[me], data, begin);
    copy(slots[me] + end, data + end, count - end);
    if (!barrier(place)) return false;
    float* slices[MOST_RANKS];
    for (int32_t r = 0; r < size; r++) slices[r] = slots[r] + begin;
    sum_staged(place, data + begin, slices, end - begin);
    if (!barrier(place)) return false;
    for (int32_t r = 0; r < size; r++) {
        int64_t from = edge(count, r, size), to = edge(count, r + 1, size);
        if (r != me) copy(data + from, slots[r] + from, to - from);
    }
    return true;
}

bool direct(pt_limit_place& place, int64_t count) {
    float* const* data = reinterpret_cast<float* const*>(place.data);
    if (!barrier(place)) return false;
    sum_everywhere(data, place.size, edge(count, place.rank, place.size), edge(count, place.rank + 1, place.size));
    return barrier(place);
}

bool staged(pt_limit_place& place, float* data, int64_t count) {
    float* slots[MOST_RANKS];
    for (int64_t at = 0; at < count; at += place.block_count) {
        int64_t piece = count - at < place.block_count ? count - at : place.block_count;
        int64_t parity = place.blocks++ & 1;
        for (int32_t r = 0; r < place.size; r++)
            slots[r] = static_cast<float*>(place.staging[r]) + parity * place.block_count;
        bool in_one = place.size == 2 || piece <= FEW_ELEMENTS;
        if (!(in_one ? one_shot : two_shot)(place, data + at, slots, piece)) return false;
    }
    return true;
}

// One look at the clock a call: it ends one and begins the next.
template <class Call>
int32_t timed(const pt_limit_place& place, double* seconds, int64_t calls, Call call) {
    if (place.size > MOST_RANKS) return TOO_MANY;
    double begun_s = now_s();
    for (int64_t i = 0; i < calls; i++) {
        if (!call()) return LATE;
        double ended_s = now_s();
        seconds[i] = ended_s - begun_s;
        begun_s = ended_s;
    }
    return FINE;
}

} // namespace

int64_t pt_limit_lines_bytes(int32_t size) { return int64_t(sizeof(Line)) * size; }

int32_t pt_limit_barrier(pt_limit_place* place, double* seconds, int64_t calls) {
    return timed(*place, seconds, calls, [=] { return barrier(*place); });
}

int32_t pt_limit_direct(pt_limit_place* place, int64_t count, double* seconds, int64_t calls) {
    return timed(*place, seconds, calls, [=] { return direct(*place, count); });
}

int32_t pt_limit_staged(pt_limit_place* place, float* data, int64_t count, double* seconds, int64_t calls) {
    return timed(*place, seconds, calls, [=] { return staged(*place, data, count); });
}
