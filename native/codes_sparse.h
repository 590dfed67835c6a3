// Kernels of codecs where a few elements are sent, and which: threshold, top-k, deep gradient compression.
//
// All look at |v| as an integer, 31 bits that order as the numbers do. A bound is such an integer; "over" it is
// > bound, so >= a number is over its bits - 1, and what is NaN or infinite is over every bound that is asked for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pt {

// What is looked at, never written:  v = x;  v = x + r;  or, where there is a u,  v = r + (momentum · u + scale · x).
struct SparseSource {
    const float *x, *r, *u;
    float momentum, scale;
};

// Of those over `bound`, those that equal `tie` only until `num_ties` of them were found.
struct SparseWanted {
    int32_t bound, tie;
    int64_t num_ties;
};

constexpr int64_t HISTOGRAM_BINS = 2048;

// What each instruction set offers.
struct SparseCodes {
    // How many are over `bound`. `bad`: the first that is NaN or infinite, or -1.
    int64_t (*count_over)(const SparseSource&, int32_t bound, int64_t n, int64_t* bad);
    // Their indices (ascending) and values, of which `room` are written at most; how many there are. Or, where one is
    // NaN or infinite, its index in `bad`, and what was written is worth nothing.
    int64_t (*gather)(
        const SparseSource&, SparseWanted, int64_t n, uint32_t* indices, float* values, int64_t room, int64_t* bad);
    // bins[(bits of |v| >> shift) mod `num_bins`] += 1 for those whose bits above are `prefix`; the first bad, or -1.
    int64_t (*histogram)(
        const SparseSource&, int shift, int64_t num_bins, uint32_t prefix, int64_t n, int64_t* bins);
    // What codes_sparse_abi.h says of pt_threshold_pack.
    void (*pack_list)(const float* x, float* r, float tau, int64_t n, uint32_t* entries);
    void (*pack_map)(const float* x, float* r, float tau, int64_t n, uint32_t* words);
    // u ← momentum · u + scale · x;  v ← v + u.
    void (*accumulate)(float momentum, float scale, const float* x, float* u, float* v, int64_t n);
};

} // namespace pt
