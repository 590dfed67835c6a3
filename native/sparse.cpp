// Hogwild! (B. Recht, C. Re, S. Wright, F. Niu, 2011) on sparse rows, and the paper's two comparisons.
//
// Weights are read and written by relaxed atomic operations of 4 aligned bytes: on every machine that we know plain
// moves, so nobody sees half a number. Load, add and store are three steps, so of two workers that write one weight
// at the same time one may be lost. That is the algorithm: where rows are sparse it is rare, and it costs little.
//
// Relaxed is enough. No weight tells anything about another; what a worker sees may be old, in any order.
#include "sparse.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <sched.h>

namespace pt {
namespace {

enum Status : int32_t { FINE = 0, LATE = 2, MISMATCH = 3, NO_MEMORY = 5 };

constexpr int LOOKS = 256; // at a word before the core is yielded: a neighbour holds it for less than this takes
constexpr double YIELD_S = 0.002; // before sleeping: whoever is awaited has no core, and yielding takes from all
constexpr long SLEEP_NS = 50'000;

inline float load(const float* from) {
    float value;
    __atomic_load(from, &value, __ATOMIC_RELAXED);
    return value;
}

inline void store(float* to, float value) { __atomic_store(to, &value, __ATOMIC_RELAXED); }

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Try until `ready()` or the deadline: spin, then yield the core, then sleep between looks.
template <typename Ready> Status wait_until(Ready ready, double timeout_s) {
    double since_s = 0;
    for (;;) {
        for (int look = 0; look < LOOKS; ++look) {
            if (ready()) return FINE;
            pause();
        }
        const double present_s = now_s();
        if (since_s == 0) since_s = present_s;
        if (present_s - since_s > timeout_s) return LATE;
        if (present_s - since_s < YIELD_S) {
            sched_yield();
        } else {
            const timespec nap{0, SLEEP_NS};
            nanosleep(&nap, nullptr);
        }
    }
}

struct Row {
    const int32_t* columns;
    const float* values;
    int64_t count;
    float label;
};

Row row_at(const pt_logistic& problem, int64_t row) {
    const int64_t begin = problem.starts[row];
    return {problem.columns + begin, problem.values + begin, problem.starts[row + 1] - begin, problem.labels[row]};
}

// row . weights, in four sums, so that additions need not wait for each other.
template <typename Weight> float product(const Row& row, Weight weight) {
    float sums[4] = {0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 4 <= row.count; i += 4)
        for (int lane = 0; lane < 4; ++lane) sums[lane] += row.values[i + lane] * weight(row.columns[i + lane]);
    for (; i < row.count; ++i) sums[0] += row.values[i] * weight(row.columns[i]);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// d/dm log(1 + exp(-label * m)) = -label / (1 + exp(label * m))
float slope(float label, float margin) { return -label / (1.0f + std::exp(label * margin)); }

struct Epoch {
    const pt_logistic& problem;
    const int64_t* order;
    int64_t begin, end, stride;
    float step_size;
    double timeout_s;

    float stepped(float weight, float gradient, int32_t column) const {
        if (problem.decay) gradient += problem.decay[column] * weight;
        return weight - step_size * gradient;
    }

    float slope_at(const Row& row) const {
        return slope(row.label, product(row, [this](int32_t column) { return load(problem.weights + column); }));
    }

    void write(const Row& row, float factor) const {
        for (int64_t i = 0; i < row.count; ++i) {
            float* weight = problem.weights + row.columns[i];
            store(weight, stepped(load(weight), factor * row.values[i], row.columns[i]));
        }
    }

    Status free() const {
        for (int64_t position = begin; position < end; position += stride) {
            const Row row = row_at(problem, order[position]);
            write(row, slope_at(row));
        }
        return FINE;
    }

    // The columns of a row rise, so all workers lock in one order and none waits for one that waits for it.
    // LATE: nothing is locked.
    Status lock(const Row& row) const {
        for (int64_t i = 0; i < row.count; ++i) {
            uint32_t* word = problem.locks + row.columns[i];
            if (i && row.columns[i] == row.columns[i - 1]) continue;
            auto taken = [word] {
                return !__atomic_load_n(word, __ATOMIC_RELAXED) && !__atomic_exchange_n(word, 1, __ATOMIC_ACQUIRE);
            };
            if (wait_until(taken, timeout_s) != FINE) {
                unlock(row, i);
                return LATE;
            }
        }
        return FINE;
    }

    void unlock(const Row& row, int64_t count) const { // its first `count` columns
        for (int64_t i = 0; i < count; ++i) __atomic_store_n(problem.locks + row.columns[i], 0, __ATOMIC_RELEASE);
    }

    Status locked() const {
        for (int64_t position = begin; position < end; position += stride) {
            const Row row = row_at(problem, order[position]);
            const float factor = slope_at(row);
            if (lock(row) != FINE) return LATE;
            write(row, factor);
            unlock(row, row.count);
        }
        return FINE;
    }

    Status in_turn() const {
        for (int64_t position = begin; position < end; position += stride) {
            const Row row = row_at(problem, order[position]);
            const float factor = slope_at(row);
            auto ours = [this, position] {
                return __atomic_load_n(problem.turn, __ATOMIC_ACQUIRE) == static_cast<uint64_t>(position);
            };
            if (wait_until(ours, timeout_s) != FINE) return LATE;
            write(row, factor);
            __atomic_store_n(problem.turn, static_cast<uint64_t>(position) + 1, __ATOMIC_RELEASE);
        }
        return FINE;
    }
};

// A worker's own weights during a window of rows. At its end it brings what it has learned to the shared ones:
//
//   shared += mine - base       exactly `mine` where nobody else has written since
//   mine = base = shared
//
// Lines of the shared weights then move between cores once a window, not once a row.
struct Window {
    const Epoch& epoch;
    int64_t num_columns;
    float* mine;
    float* base;

    void begin() const {
        for (int64_t i = 0; i < num_columns; ++i) mine[i] = base[i] = load(epoch.problem.weights + i);
    }

    void exchange() const {
        for (int64_t i = 0; i < num_columns; ++i) {
            float now = load(epoch.problem.weights + i);
            if (mine[i] != base[i]) {
                now = now == base[i] ? mine[i] : now + (mine[i] - base[i]);
                store(epoch.problem.weights + i, now);
            }
            mine[i] = base[i] = now;
        }
    }

    void learn(const Row& row) const {
        const float* weights = mine;
        const float factor = slope(row.label, product(row, [weights](int32_t column) { return weights[column]; }));
        for (int64_t i = 0; i < row.count; ++i)
            mine[row.columns[i]] = epoch.stepped(mine[row.columns[i]], factor * row.values[i], row.columns[i]);
    }

    void run(int64_t length) const {
        begin();
        int64_t rows = 0;
        for (int64_t position = epoch.begin; position < epoch.end; position += epoch.stride) {
            learn(row_at(epoch.problem, epoch.order[position]));
            if (++rows % length == 0) exchange();
        }
        exchange();
    }
};

Status windows(const Epoch& epoch, int64_t length) {
    const int64_t count = epoch.problem.num_columns;
    auto* memory = static_cast<float*>(std::calloc(2 * static_cast<size_t>(count) + 1, sizeof(float)));
    if (!memory) return NO_MEMORY;
    Window{epoch, count, memory, memory + count}.run(length);
    std::free(memory);
    return FINE;
}

} // namespace
} // namespace pt

using namespace pt;

extern "C" int32_t pt_logistic_epoch(
    const pt_logistic* problem, const int64_t* order, int64_t begin, int64_t end, int64_t stride, float step_size,
    int32_t update, int64_t window, double timeout_s, int64_t* updates) {
    const Epoch epoch{*problem, order, begin, end, stride, step_size, timeout_s};
    *updates = begin < end ? (end - begin + stride - 1) / stride : 0;
    if (update == PT_LOCKED) return epoch.locked();
    if (update == PT_IN_TURN) return epoch.in_turn();
    return window > 1 ? windows(epoch, window) : epoch.free();
}

extern "C" int32_t pt_scatter_add(
    float* table, int64_t num_rows, int64_t width, const int64_t* rows, const float* values, int64_t count, float scale) {
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= num_rows) return MISMATCH;
    for (int64_t i = 0; i < count; ++i) {
        float* row = table + rows[i] * width;
        for (int64_t j = 0; j < width; ++j) store(row + j, load(row + j) + scale * values[i * width + j]);
    }
    return FINE;
}
