// What a step of the one copy works on; see step.cpp for the layout.
#pragma once

#include <cstring>

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
    double squares[2]; // of the rank's slice: see pt_layer_squares
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

inline int64_t element_bytes(const pt_tensor& tensor) { return tensor.dtype == F64 ? 8 : 4; }

// The first meeting of a call: `op` says which, `agreed` has to be the same on every rank. Who passes it has read
// that all are there and mean the same; nobody has written anything that counts.
Status begin(Group& group, Plan& plan, const pt_part& part, int32_t op, uint64_t agreed, int64_t deadline_ns);

uint64_t hash(uint64_t seed, const void* data, size_t num_bytes);

// The hyper-parameters of a tensor that has made so many steps.
inline Hyper hyper_of(const pt_hyper& given, float steps) {
    Hyper hyper;
    static_assert(sizeof hyper == sizeof given, "one is the other's face in C");
    std::memcpy(&hyper, &given, sizeof hyper);
    hyper.step = static_cast<int64_t>(steps) + 1;
    hyper.first = steps == 0;
    return hyper;
}

// The rows of tensor `index` that are `owner`'s to update: sorted into plan.scratch, from all ranks in their order.
// Returns how many. The same for every caller, so that another rank can go on where the owner ended.
template <class T> int64_t gather_rows(const Group& group, Plan& plan, int64_t index, int owner);

// The end of the entries that have the row of entry `begin`.
inline int64_t end_of_row(const Scratch& scratch, int64_t begin, int64_t count) {
    int64_t end = begin + 1;
    while (end < count && scratch.entries[end].row == scratch.entries[begin].row) ++end;
    return end;
}

template <class T> struct Gradients {
    const T* pointers[MAX_RANKS];
    T weights[MAX_RANKS];
};

// Every rank's gradient from element `begin` on; null where it has none, or does not count.
template <class T> void find(const Group& group, const Plan& plan, const Piece& piece, Gradients<T>& found) {
    for (int rank = 0; rank < group.size; ++rank) {
        Notes& notes = *plan.notes[rank];
        const bool counts = notes.weight != 0 && notes.of(piece.tensor).used;
        const char* gradient = plan.gradients[rank] + plan.tensors[piece.tensor].gradient;
        found.pointers[rank] = counts ? reinterpret_cast<const T*>(gradient) + piece.begin : nullptr;
        found.weights[rank] = static_cast<T>(notes.weight);
    }
}

} // namespace pt
