// Kernels of codecs that draw: QSGD, TernGrad, natural compression, and their counter-based generator.
//
// Draws. The 32 bits for element i are a function of a key and of i alone, so they do not depend on threads, on the
// order of work or on the instruction set: the integer finalizer "lowbias32" (C. Wellons, "Prospecting for hash
// functions", 2018) of i xor the key's lower half, with the upper half put in between its two multiplications.
// A probability p is compared with the 30 upper bits, as floor(2^30 p) > draw: p = 1 always happens, p = 0 never.
//
// Fields. Codes of `width` bits lie in 16 lanes of words of 32 bits, so that a vector packs them without a shuffle:
//
//   block    codes 0…15 | 16…31 | 32…47 | …     `positions` rows of 16 codes
//   lane j   codes j, 16 + j, 32 + j, …         from the lowest bit on, in `words` words; then zeros
//   memory   word 0 of lanes 0…15 | word 1 of lanes 0…15 | …
//
// The last block has as few lanes as hold the rest. positions · width = 32 · words where a code may begin in a word and
// end in the next; words = 1 where words are added as numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pt {

struct Fields {
    int32_t width, positions, words; // positions <= 32
};

// What each instruction set offers. Tensors are flat, at any address. Where a `residual` is given, v = x + residual is
// encoded and residual becomes v - decoded; null: v = x. Answers are -1, or an element of the first bucket (QSGD) or
// chunk (natural) that holds NaN or an infinity, or 0 (TernGrad's scaler); then no residual has changed, and the wire is
// to be thrown away. Sums of squares are taken in f64, in 16 lanes that are added pairwise at the end.
struct DrawnCodes {
    // Wire: a float for each bucket, the step between levels (norm / levels, rounded up), then fields of level + levels.
    int64_t (*qsgd_encode)(
        const float* x, float* residual, int64_t count, int64_t bucket, int32_t levels, Fields fields, uint64_t key,
        void* wire);
    // out += decoded, or out = decoded.
    void (*qsgd_decode)(
        const void* wire, float* out, int64_t count, int64_t bucket, int32_t levels, Fields fields, bool add);
    // scaler = the smaller of max |v| and clip times the root of the mean square; clip 0: max |v|.
    int64_t (*terngrad_scaler)(const float* x, const float* residual, int64_t count, double clip, float* scaler);
    // Fields of t + 1, where t is the sign of v with probability min(|v|, own) / scaler, else 0.
    void (*terngrad_encode)(
        const float* x, float* residual, int64_t count, float own, float scaler, Fields fields, uint64_t key, void* words);
    // Of the sum of `terms` wires.
    void (*terngrad_decode)(
        const void* words, float* out, int64_t count, float scaler, int32_t terms, Fields fields, bool add);
    // Wire: a byte of exponent for each element, zeros up to a multiple of 4 bytes, then fields of 1 bit: the signs.
    int64_t (*natural_encode)(const float* x, float* residual, int64_t count, uint64_t key, void* wire);
    void (*natural_decode)(const void* wire, float* out, int64_t count, bool add);
};

} // namespace pt
