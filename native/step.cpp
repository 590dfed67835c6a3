// One copy of the weights and of the optimizer's state for all ranks of a host.
//
//   arena of rank 0    parameters │ first moments │ second moments     (three blocks, the same offsets in each)
//   each rank's arena  gradients │ notes: weight, which tensors have a gradient, where rows lie │ log
//
//   write notes ── meet ── own slice:  all ranks' gradients ─▶ log ─▶ the one copy, record by record ── meet
//
// Until all have met nobody writes, so a rank that dies before costs nothing but its step. Once all have met, the step
// will be made, whoever dies. A slice is made of records: a piece of a tensor, or some rows of one. A record is
// computed into the log, declared complete, copied into place, declared placed. The next one is computed only then.
//
//   complete 7, placed 7    record 8 may have been begun: the copy does not show it, so it is computed anew
//   complete 8, placed 7    record 8 may lie in place in part: it is copied again
//
// The lowest living rank goes on where the log ends, in the same log, so that the next one can go on after it.
//
// A process ends between two instructions: what they stored before is seen by all, and nothing of what would have
// come. So only the compiler must keep the order in the log, and the end of the process is what others wait for.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "group.h"
#include "kernels.h"
#include "step.h"

namespace pt {

constexpr int64_t RECORD_BYTES = 32 << 10; // of a tensor; with both moments, about what the second-level cache likes
constexpr int64_t MOST_COPIES = 1536;
constexpr int BLOCKS = 3;
enum BlockName : int32_t { PARAMETER = 0, FIRST, SECOND };

struct Copy {
    int32_t block;
    int32_t num_bytes;
    int64_t offset;
};

struct alignas(64) Log {
    std::atomic<int64_t> complete, placed; // numbers of records of this step, from 1
    std::atomic<uint64_t> finished;        // the call whose slice is all in place
    int64_t num_copies, num_bytes;
    Copy copies[MOST_COPIES];
    alignas(64) char data[BLOCKS * RECORD_BYTES];
};

struct Note {
    int64_t used, rows, values, count;
};

struct alignas(64) Notes {
    double weight, sum_of_squares;
    // followed by a Note for each tensor

    Note& of(int64_t tensor) { return reinterpret_cast<Note*>(this + 1)[tensor]; }
};

struct Piece {
    int64_t tensor, begin, count;
};

struct Entry { // a row of one rank's gradient
    int64_t row;
    const char* values;
    double weight;
};

// Memory for the rows of one tensor in a rank's slice; it grows and stays.
struct Scratch {
    int64_t capacity;
    Entry *entries, *spare;
    const void** pointers;
    double* weights; // as float where the tensor is f32
};

struct Plan {
    pt_tensor* tensors;
    int64_t num_tensors;
    char* blocks[BLOCKS];
    char** gradients;
    Notes** notes;
    Log** logs;
    Piece* pieces; // of all tensors whose gradients are not rows
    int64_t* firsts; // firsts[r]: the first piece of rank r's slice; firsts[size]: how many there are
    uint8_t* used;   // whether any rank has a gradient
    int64_t count;
    Scratch scratch;
};

// A process without memory in mid-step ends as if it were killed, and the others make its part.
static void* more(void* memory, int64_t num_bytes) {
    void* found = std::realloc(memory, std::max<int64_t>(num_bytes, 1));
    if (!found) std::abort();
    return found;
}

static void reserve(Scratch& scratch, int64_t wanted) {
    if (wanted <= scratch.capacity) return;
    const int64_t capacity = std::max(wanted, 2 * scratch.capacity);
    scratch.entries = static_cast<Entry*>(more(scratch.entries, capacity * sizeof(Entry)));
    scratch.spare = static_cast<Entry*>(more(scratch.spare, capacity * sizeof(Entry)));
    scratch.pointers = static_cast<const void**>(more(scratch.pointers, capacity * sizeof(void*)));
    scratch.weights = static_cast<double*>(more(scratch.weights, capacity * sizeof(double)));
    scratch.capacity = capacity;
}

static int64_t element_bytes(const pt_tensor& tensor) { return tensor.dtype == F64 ? 8 : 4; }

// ------------------------------------------------------------------------------------------------- rows of a gradient

// By row, and rows alike in their order: least significant digit first, 11 bits a pass.
static void sort_by_row(Scratch& scratch, int64_t count, int64_t num_rows) {
    constexpr int BITS = 11;
    for (int shift = 0; num_rows > 1 && (num_rows - 1) >> shift; shift += BITS) {
        int64_t places[1 << BITS] = {};
        for (int64_t i = 0; i < count; ++i) ++places[scratch.entries[i].row >> shift & ((1 << BITS) - 1)];
        int64_t sum = 0;
        for (int64_t& place : places) sum += std::exchange(place, sum);
        for (int64_t i = 0; i < count; ++i)
            scratch.spare[places[scratch.entries[i].row >> shift & ((1 << BITS) - 1)]++] = scratch.entries[i];
        std::swap(scratch.entries, scratch.spare);
    }
}

// Rows are dealt to the ranks in whole cache lines, for the first rows are often the busiest.
static int owner_of(int64_t row, const pt_tensor& tensor, int size) {
    const int64_t rows_of_line = std::max<int64_t>(1, 64 / (tensor.width * element_bytes(tensor)));
    return static_cast<int>(row / rows_of_line % size);
}

// The rows of tensor `index` that are `owner`'s to update, sorted, from all ranks in their order.
template <class T> static int64_t gather_rows(const Group& group, Plan& plan, int64_t index, int owner) {
    const pt_tensor& tensor = plan.tensors[index];
    int64_t most = 0, count = 0;
    for (int rank = 0; rank < group.size; ++rank) most += plan.notes[rank]->of(index).count;
    reserve(plan.scratch, most);
    for (int rank = 0; rank < group.size; ++rank) {
        const Note& note = plan.notes[rank]->of(index);
        const double weight = plan.notes[rank]->weight;
        const auto* rows = reinterpret_cast<const int64_t*>(group.arenas[rank] + note.rows);
        const char* values = group.arenas[rank] + note.values;
        for (int64_t i = 0; note.used && weight != 0 && i < note.count; ++i)
            if (owner_of(rows[i], tensor, group.size) == owner)
                plan.scratch.entries[count++] = {rows[i], values + i * tensor.width * sizeof(T), weight};
    }
    sort_by_row(plan.scratch, count, tensor.count / tensor.width);
    for (int64_t i = 0; i < count; ++i) {
        plan.scratch.pointers[i] = plan.scratch.entries[i].values;
        reinterpret_cast<T*>(plan.scratch.weights)[i] = static_cast<T>(plan.scratch.entries[i].weight);
    }
    return count;
}

// The end of the entries that have the row of entry `begin`.
static int64_t end_of_row(const Scratch& scratch, int64_t begin, int64_t count) {
    int64_t end = begin + 1;
    while (end < count && scratch.entries[end].row == scratch.entries[begin].row) ++end;
    return end;
}

// ------------------------------------------------------------------------------------------------------------- a slice

template <class T> struct Gradients {
    const T* pointers[MAX_RANKS];
    T weights[MAX_RANKS];
};

// Every rank's gradient from element `begin` on; null where it has none, or does not count.
template <class T> static void find(const Group& group, const Plan& plan, const Piece& piece, Gradients<T>& found) {
    for (int rank = 0; rank < group.size; ++rank) {
        Notes& notes = *plan.notes[rank];
        const bool counts = notes.weight != 0 && notes.of(piece.tensor).used;
        const char* gradient = plan.gradients[rank] + plan.tensors[piece.tensor].gradient;
        found.pointers[rank] = counts ? reinterpret_cast<const T*>(gradient) + piece.begin : nullptr;
        found.weights[rank] = static_cast<T>(notes.weight);
    }
}

// The part of a step that is `rank`'s: made by that rank, or, if it is lost, by another.
struct Slice {
    Group& group;
    Plan& plan;
    const pt_hyper* hypers;
    const float* steps;
    int rank;
    Log& log = *plan.logs[rank];
    int64_t record = 0;

    bool is_next() { return ++record > log.complete.load(std::memory_order_relaxed); }

    void copy_into_place() {
        const char* from = log.data;
        for (int64_t i = 0; i < log.num_copies; from += log.copies[i++].num_bytes)
            std::memcpy(plan.blocks[log.copies[i].block] + log.copies[i].offset, from, log.copies[i].num_bytes);
        // release: after the copies. Nothing of the next record may be stored before.
        log.placed.store(log.complete.load(std::memory_order_relaxed), std::memory_order_release);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        log.num_copies = log.num_bytes = 0;
    }

    void publish() {
        if (!log.num_copies) return;
        log.complete.store(record, std::memory_order_release); // after everything that the record holds
        std::atomic_signal_fence(std::memory_order_seq_cst);
        copy_into_place();
    }

    template <class T> T* logged(bool wanted, BlockName block, int64_t offset, int64_t count) {
        if (!wanted) return nullptr;
        const auto num_bytes = static_cast<int32_t>(count * sizeof(T));
        log.copies[log.num_copies++] = {block, num_bytes, offset};
        log.num_bytes += num_bytes;
        return reinterpret_cast<T*>(log.data + log.num_bytes - num_bytes);
    }

    template <class T> const T* at(BlockName block, int64_t offset) const {
        return plan.blocks[block] ? reinterpret_cast<const T*>(plan.blocks[block] + offset) : nullptr;
    }

    // Add the update of `count` elements to the record.
    template <class T>
    void update_elements(
        int64_t index, int64_t begin, int64_t count, const T* const* gradients, const T* weights, int num_gradients) {
        const pt_tensor& tensor = plan.tensors[index];
        Hyper hyper;
        static_assert(sizeof hyper == sizeof(pt_hyper), "one is the other's face in C");
        std::memcpy(&hyper, &hypers[tensor.group], sizeof hyper);
        hyper.step = static_cast<int64_t>(steps[index]) + 1;
        hyper.first = steps[index] == 0;
        const bool adam = hyper.rule == ADAM || hyper.rule == ADAMW;
        const int64_t offset = tensor.offset + begin * static_cast<int64_t>(sizeof(T));
        T* p = logged<T>(true, PARAMETER, offset, count);
        T* m = logged<T>(adam || (hyper.rule == SGD && hyper.momentum != 0), FIRST, offset, count);
        T* v = logged<T>(adam || hyper.rule == ADAGRAD, SECOND, offset, count);
        update(
            hyper, gradients, weights, num_gradients, at<T>(PARAMETER, offset), at<T>(FIRST, offset),
            at<T>(SECOND, offset), p, m, v, count);
    }

    template <class T> void update_piece(const Piece& piece) {
        Gradients<T> gradients;
        find(group, plan, piece, gradients);
        update_elements(piece.tensor, piece.begin, piece.count, gradients.pointers, gradients.weights, group.size);
        publish();
    }

    template <class T> void update_rows(int64_t index) {
        const int64_t width = plan.tensors[index].width;
        const int64_t most = std::min<int64_t>(MOST_COPIES / BLOCKS, RECORD_BYTES / (width * sizeof(T)));
        const int64_t count = gather_rows<T>(group, plan, index, rank);
        const auto* pointers = reinterpret_cast<const T* const*>(plan.scratch.pointers);
        const auto* weights = reinterpret_cast<const T*>(plan.scratch.weights);
        for (int64_t begin = 0; begin < count;) {
            const bool next = is_next();
            for (int64_t rows = 0; rows < most && begin < count; ++rows) {
                const int64_t end = end_of_row(plan.scratch, begin, count);
                if (next)
                    update_elements(
                        index, plan.scratch.entries[begin].row * width, width, pointers + begin, weights + begin,
                        static_cast<int>(end - begin));
                begin = end;
            }
            publish();
        }
    }

    void run() {
        if (log.complete.load(std::memory_order_acquire) != log.placed.load(std::memory_order_acquire))
            copy_into_place();
        log.num_copies = log.num_bytes = 0; // of a record that was begun
        for (int64_t i = plan.firsts[rank]; i < plan.firsts[rank + 1]; ++i) {
            const Piece& piece = plan.pieces[i];
            if (!is_next() || !plan.used[piece.tensor]) continue;
            plan.tensors[piece.tensor].dtype == F64 ? update_piece<double>(piece) : update_piece<float>(piece);
        }
        for (int64_t i = 0; i < plan.num_tensors; ++i) {
            if (plan.tensors[i].gradient >= 0 || !plan.used[i]) continue;
            plan.tensors[i].dtype == F64 ? update_rows<double>(i) : update_rows<float>(i);
        }
        log.finished.store(group.number, std::memory_order_release);
    }
};

// -------------------------------------------------------------------------------------------------------------- meeting

static void write_notes(const Group& group, const Plan& plan, const pt_part& part) {
    Notes& notes = *plan.notes[group.rank];
    notes.weight = part.weight;
    for (int64_t i = 0; i < plan.num_tensors; ++i) {
        notes.of(i) = {part.used[i], 0, 0, 0};
        if (plan.tensors[i].gradient < 0 && part.used[i])
            notes.of(i) = {1, part.rows[i].rows, part.rows[i].values, part.rows[i].count};
    }
}

static void find_used(const Group& group, Plan& plan) {
    for (int64_t i = 0; i < plan.num_tensors; ++i) {
        plan.used[i] = 0;
        for (int rank = 0; rank < group.size; ++rank) plan.used[i] |= plan.notes[rank]->of(i).used != 0;
    }
}

static uint64_t hash(uint64_t seed, const void* data, size_t num_bytes) { // FNV-1a
    for (size_t i = 0; i < num_bytes; ++i) seed = (seed ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
    return seed;
}

static Status begin(Group& group, Plan& plan, const pt_part& part, int32_t op, uint64_t agreed, int64_t deadline_ns) {
    agreed = hash(agreed, plan.tensors, plan.num_tensors * sizeof(pt_tensor));
    describe(group, STEP, plan.tensors[0].dtype, op, 0, plan.count, static_cast<int64_t>(agreed));
    write_notes(group, plan, part);
    Log& log = *plan.logs[group.rank];
    log.complete.store(0, std::memory_order_relaxed); // seen by all who meet
    log.placed.store(0, std::memory_order_relaxed);
    Status status = meet(group, deadline_ns);
    if (status == FINE) status = agree(group);
    if (status == FINE) find_used(group, plan);
    return status;
}

static bool all_finished(const Group& group, const Plan& plan) {
    for (int rank = 0; rank < group.size; ++rank)
        if (plan.logs[rank]->finished.load(std::memory_order_acquire) != group.number) return false;
    return true;
}

static bool is_lowest_living(const Group& group) {
    for (int rank = 0; rank < group.rank; ++rank)
        if (!is_gone(group, rank)) return false;
    return true;
}

// A rank is lost in mid-step: wait until every slice is made, and make those of the lost if no lower rank lives.
// Who is gone stays gone, so at no time do two ranks take themselves for the lowest.
static bool recover(Group& group, Plan& plan, const pt_hyper* hypers, const float* steps, int64_t deadline_ns) {
    std::atomic<uint32_t> nobody{0};
    while (!all_finished(group, plan)) {
        if (now_ns() > deadline_ns) return false;
        bool waits = true;
        for (int rank = 0; is_lowest_living(group) && rank < group.size; ++rank)
            if (plan.logs[rank]->finished.load(std::memory_order_acquire) != group.number && is_gone(group, rank)) {
                Slice{group, plan, hypers, steps, rank}.run();
                waits = false;
            }
        if (waits) sleep_on(nobody, 0, 1'000'000);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------- the norm

// Σᵢ (Σᵣ wᵣ gᵣᵢ)² over `count` elements, in blocks that stay in the first-level cache.
template <class T>
static double sum_of_squares(const T* const* gradients, const T* weights, int num_gradients, int64_t count) {
    constexpr int64_t BLOCK = 512;
    double lanes[8] = {};
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t length = std::min(BLOCK, count - begin);
        double sum[BLOCK] = {};
        for (int r = 0; r < num_gradients; ++r)
            for (int64_t i = 0; gradients[r] && i < length; ++i)
                sum[i] += static_cast<double>(weights[r]) * static_cast<double>(gradients[r][begin + i]);
        for (int64_t i = 0; i < BLOCK; i += 8)
            for (int lane = 0; lane < 8; ++lane) lanes[lane] += sum[i + lane] * sum[i + lane];
    }
    double total = 0;
    for (const double lane : lanes) total += lane;
    return total;
}

template <class T> static double squares_of_rows(const Group& group, Plan& plan, int64_t index) {
    const int64_t count = gather_rows<T>(group, plan, index, group.rank);
    const auto* pointers = reinterpret_cast<const T* const*>(plan.scratch.pointers);
    const auto* weights = reinterpret_cast<const T*>(plan.scratch.weights);
    double total = 0;
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
        end = end_of_row(plan.scratch, begin, count);
        total += sum_of_squares(
            pointers + begin, weights + begin, static_cast<int>(end - begin), plan.tensors[index].width);
    }
    return total;
}

template <class T> static double squares_of_piece(const Group& group, const Plan& plan, const Piece& piece) {
    Gradients<T> gradients;
    find(group, plan, piece, gradients);
    return sum_of_squares(gradients.pointers, gradients.weights, group.size, piece.count);
}

static double squares_of_slice(const Group& group, Plan& plan) {
    double total = 0;
    for (int64_t i = plan.firsts[group.rank]; i < plan.firsts[group.rank + 1]; ++i) {
        const Piece& piece = plan.pieces[i];
        const bool wide = plan.tensors[piece.tensor].dtype == F64;
        total += wide ? squares_of_piece<double>(group, plan, piece) : squares_of_piece<float>(group, plan, piece);
    }
    for (int64_t i = 0; i < plan.num_tensors; ++i) {
        if (plan.tensors[i].gradient >= 0 || !plan.used[i]) continue;
        const bool wide = plan.tensors[i].dtype == F64;
        total += wide ? squares_of_rows<double>(group, plan, i) : squares_of_rows<float>(group, plan, i);
    }
    return total;
}

// ------------------------------------------------------------------------------------------------------------- the plan

static int64_t cut(const pt_plan_place& place, Piece* pieces) {
    int64_t num_pieces = 0;
    for (int64_t i = 0; i < place.num_tensors; ++i) {
        const pt_tensor& tensor = place.tensors[i];
        const int64_t most = RECORD_BYTES / element_bytes(tensor);
        for (int64_t begin = 0; tensor.gradient >= 0 && begin < tensor.count; begin += most) {
            if (pieces) pieces[num_pieces] = {i, begin, std::min(most, tensor.count - begin)};
            ++num_pieces;
        }
    }
    return num_pieces;
}

// Consecutive pieces to each rank, of about equally many elements.
static void deal(const Plan& plan, int64_t num_pieces, int size) {
    int64_t total = 0, before = 0, piece = 0;
    for (int64_t i = 0; i < num_pieces; ++i) total += plan.pieces[i].count;
    for (int rank = 0; rank < size; ++rank) {
        while (piece < num_pieces && (before + plan.pieces[piece].count / 2) * size < total * rank)
            before += plan.pieces[piece++].count;
        plan.firsts[rank] = piece;
    }
    plan.firsts[size] = num_pieces;
}

} // namespace pt

using namespace pt;

int64_t pt_notes_bytes(int64_t num_tensors) { return sizeof(Notes) + num_tensors * sizeof(Note); }
int64_t pt_log_bytes(void) { return sizeof(Log); }
int64_t pt_most_row_bytes(void) { return RECORD_BYTES; }

template <class T> static T* copied(const T* from, int64_t count) {
    auto* memory = static_cast<T*>(more(nullptr, count * sizeof(T)));
    if (count) std::memcpy(memory, from, count * sizeof(T));
    return memory;
}

pt_plan* pt_plan_open(pt_group* handle, const pt_plan_place* place) {
    const auto& group = *reinterpret_cast<Group*>(handle);
    auto* plan = static_cast<Plan*>(more(nullptr, sizeof(Plan)));
    *plan = Plan{};
    plan->num_tensors = place->num_tensors;
    plan->tensors = copied(place->tensors, place->num_tensors);
    for (int block = 0; block < BLOCKS; ++block) plan->blocks[block] = static_cast<char*>(place->blocks[block]);
    plan->gradients = copied(reinterpret_cast<char* const*>(place->gradients), group.size);
    plan->notes = copied(reinterpret_cast<Notes* const*>(place->notes), group.size);
    plan->logs = copied(reinterpret_cast<Log* const*>(place->logs), group.size);
    const int64_t num_pieces = cut(*place, nullptr);
    plan->pieces = static_cast<Piece*>(more(nullptr, num_pieces * sizeof(Piece)));
    cut(*place, plan->pieces);
    plan->firsts = static_cast<int64_t*>(more(nullptr, (group.size + 1) * sizeof(int64_t)));
    deal(*plan, num_pieces, group.size);
    plan->used = static_cast<uint8_t*>(more(nullptr, place->num_tensors));
    for (int64_t i = 0; i < place->num_tensors; ++i) plan->count += place->tensors[i].count;
    return reinterpret_cast<pt_plan*>(plan);
}

void pt_plan_close(pt_plan* handle) {
    auto* plan = reinterpret_cast<Plan*>(handle);
    Scratch& scratch = plan->scratch;
    for (void* memory : {static_cast<void*>(plan->tensors), static_cast<void*>(plan->gradients),
                         static_cast<void*>(plan->notes), static_cast<void*>(plan->logs),
                         static_cast<void*>(plan->pieces), static_cast<void*>(plan->firsts),
                         static_cast<void*>(plan->used), static_cast<void*>(scratch.entries),
                         static_cast<void*>(scratch.spare), static_cast<void*>(scratch.pointers),
                         static_cast<void*>(scratch.weights), static_cast<void*>(plan)})
        std::free(memory);
}

int32_t pt_step(
    pt_group* group_handle, pt_plan* plan_handle, const pt_part* part, const pt_hyper* hypers, int64_t num_groups,
    float* steps, double timeout_s, int32_t* done) {
    auto& group = *reinterpret_cast<Group*>(group_handle);
    auto& plan = *reinterpret_cast<Plan*>(plan_handle);
    *done = 0;
    if (group.broken != FINE) return BROKEN;
    const int64_t deadline_ns = deadline_after(timeout_s);
    uint64_t agreed = hash(num_groups, hypers, num_groups * sizeof(pt_hyper));
    agreed = hash(agreed, steps, plan.num_tensors * sizeof(float));
    Status status = begin(group, plan, *part, 0, agreed, deadline_ns);
    if (status != FINE) return status;
    Slice{group, plan, hypers, steps, group.rank}.run();
    status = meet(group, deadline_ns);
    if (status == LATE || (status == LOST && !recover(group, plan, hypers, steps, deadline_ns))) return status;
    for (int64_t i = 0; i < plan.num_tensors; ++i) steps[i] += plan.used[i];
    *done = 1;
    return status;
}

int32_t pt_norm(pt_group* group_handle, pt_plan* plan_handle, const pt_part* part, double timeout_s, double* norm) {
    auto& group = *reinterpret_cast<Group*>(group_handle);
    auto& plan = *reinterpret_cast<Plan*>(plan_handle);
    if (group.broken != FINE) return BROKEN;
    const int64_t deadline_ns = deadline_after(timeout_s);
    Status status = begin(group, plan, *part, 1, 0, deadline_ns);
    if (status != FINE) return status;
    plan.notes[group.rank]->sum_of_squares = squares_of_slice(group, plan);
    status = meet(group, deadline_ns);
    if (status != FINE) return status;
    double total = 0;
    for (int rank = 0; rank < group.size; ++rank) total += plan.notes[rank]->sum_of_squares;
    *norm = __builtin_sqrt(total);
    return FINE;
}
