// Hogwild! (B. Recht, C. Re, S. Wright, F. Niu, 2011) on sparse rows, and the paper's two comparisons.
//
// Weights are read and written by relaxed atomic operations of 4 or 8 aligned bytes: on every machine that we know
// plain moves, so nobody sees half a number. Load, add and store are three steps, so of two workers that write one
// weight at the same time one may be lost. Where rows are sparse that is rare. The paper assumes that an addition is
// one step: PT_ATOMIC makes it one by compare-exchange, which costs more and loses nothing.
//
// Relaxed is enough for both. No weight tells anything about another; what a worker sees may be old, in any order. A
// compare-exchange of any ordering replaces the newest value of its own weight, and that is all that a sum needs.
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
constexpr int64_t AHEAD = 8; // rows

template <typename T> T load(const T* from) {
    T value;
    __atomic_load(from, &value, __ATOMIC_RELAXED);
    return value;
}

// weight = next(weight); the new value. With ATOMIC it is one step: where another worker has written in between, `next`
// is computed again from its value. An exchange fails only where another's succeeds (or, weak, by chance), so workers
// together always advance. Bits are compared, so NaN equals itself. Relaxed in both cases: see above.
template <bool ATOMIC, typename T, typename Next> T replace(T* weight, Next next) {
    T old = load(weight), now = next(old);
    if constexpr (ATOMIC) {
        while (!__atomic_compare_exchange(weight, &old, &now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) now = next(old);
    } else {
        __atomic_store(weight, &now, __ATOMIC_RELAXED);
    }
    return now;
}

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

    template <bool ATOMIC> void write(const Row& row, float factor) const {
        for (int64_t i = 0; i < row.count; ++i)
            replace<ATOMIC>(problem.weights + row.columns[i], [&](float weight) {
                return stepped(weight, factor * row.values[i], row.columns[i]);
            });
    }

    template <bool ATOMIC> Status unlocked() const {
        for (int64_t position = begin; position < end; position += stride) {
            const Row row = row_at(problem, order[position]);
            write<ATOMIC>(row, slope_at(row));
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
            write<false>(row, factor);
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
            write<false>(row, factor);
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

    template <bool ATOMIC> void exchange() const {
        for (int64_t i = 0; i < num_columns; ++i) {
            float* weight = epoch.problem.weights + i;
            mine[i] = base[i] = mine[i] == base[i] ? load(weight) : replace<ATOMIC>(weight, [this, i](float now) {
                return now == base[i] ? mine[i] : now + (mine[i] - base[i]);
            });
        }
    }

    void learn(const Row& row) const {
        const float* weights = mine;
        const float factor = slope(row.label, product(row, [weights](int32_t column) { return weights[column]; }));
        for (int64_t i = 0; i < row.count; ++i)
            mine[row.columns[i]] = epoch.stepped(mine[row.columns[i]], factor * row.values[i], row.columns[i]);
    }

    template <bool ATOMIC> void run(int64_t length) const {
        begin();
        int64_t rows = 0;
        for (int64_t position = epoch.begin; position < epoch.end; position += epoch.stride) {
            learn(row_at(epoch.problem, epoch.order[position]));
            if (++rows % length == 0) exchange<ATOMIC>();
        }
        exchange<ATOMIC>();
    }
};

template <bool ATOMIC> Status learn(const Epoch& epoch, int64_t length) {
    if (length <= 1) return epoch.unlocked<ATOMIC>();
    const int64_t count = epoch.problem.num_columns;
    auto* memory = static_cast<float*>(std::calloc(2 * static_cast<size_t>(count) + 1, sizeof(float)));
    if (!memory) return NO_MEMORY;
    Window{epoch, count, memory, memory + count}.run<ATOMIC>(length);
    std::free(memory);
    return FINE;
}

template <bool ATOMIC, typename T>
void scatter_add(T* table, int64_t width, const int64_t* rows, const T* values, int64_t count, T scale) {
    for (int64_t i = 0; i < count; ++i) {
        // A compare-exchange waits for its cache line, and later ones wait for it: ask for the lines of later rows now.
        if (ATOMIC && i + AHEAD < count) __builtin_prefetch(table + rows[i + AHEAD] * width, 1);
        T* row = table + rows[i] * width;
        for (int64_t j = 0; j < width; ++j, ++values)
            if (!ATOMIC || *values != 0) replace<ATOMIC>(row + j, [=](T weight) { return weight + scale * *values; });
    }
}

template <typename T>
void scatter_add(
    void* table, int64_t width, const int64_t* rows, const void* values, int64_t count, double scale, bool atomic) {
    auto* add = atomic ? scatter_add<true, T> : scatter_add<false, T>;
    add(static_cast<T*>(table), width, rows, static_cast<const T*>(values), count, static_cast<T>(scale));
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
    return update == PT_ATOMIC ? learn<true>(epoch, window) : learn<false>(epoch, window);
}

extern "C" int32_t pt_scatter_add(
    int32_t dtype, void* table, int64_t num_rows, int64_t width, const int64_t* rows, const void* values, int64_t count,
    double scale, int32_t atomic) {
    if (dtype != 0 && dtype != 1) return MISMATCH;
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= num_rows) return MISMATCH;
    auto* add = dtype == 0 ? scatter_add<float> : scatter_add<double>;
    add(table, width, rows, values, count, scale, atomic != 0);
    return FINE;
}
