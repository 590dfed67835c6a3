// A plan: how the tensors are cut and dealt, the meeting that begins a step, and the rows of sparse gradients.
#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace pt {

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

// ------------------------------------------------------------------------------------------------------------ meeting

static void write_notes(const Group& group, const Plan& plan, const pt_part& part) {
    Notes& notes = *plan.notes[group.rank];
    notes.weight = part.weight;
    for (int64_t i = 0; i < plan.num_tensors; ++i) {
        notes.of(i) = {part.used[i], 0, 0, 0, {}};
        if (plan.tensors[i].gradient < 0 && part.used[i])
            notes.of(i) = {1, part.rows[i].rows, part.rows[i].values, part.rows[i].count, {}};
    }
}

static void find_used(const Group& group, Plan& plan) {
    for (int64_t i = 0; i < plan.num_tensors; ++i) {
        plan.used[i] = 0;
        for (int rank = 0; rank < group.size; ++rank) plan.used[i] |= plan.notes[rank]->of(i).used != 0;
    }
}

uint64_t hash(uint64_t seed, const void* data, size_t num_bytes) { // FNV-1a
    for (size_t i = 0; i < num_bytes; ++i) seed = (seed ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
    return seed;
}

Status begin(Group& group, Plan& plan, const pt_part& part, int32_t op, uint64_t agreed, int64_t deadline_ns) {
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

template <class T> int64_t gather_rows(const Group& group, Plan& plan, int64_t index, int owner) {
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

template int64_t gather_rows<float>(const Group&, Plan&, int64_t, int);
template int64_t gather_rows<double>(const Group&, Plan&, int64_t, int);

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
