// Kernels of codecs where every element becomes a code of the same number of bits: casts, int8, one bit, signs.
//
// Every encoder takes x and perhaps a residual r (null: none). It encodes v = x + r, and then r = v - what the code
// decodes to, to the bit. It answers -1, or the index of the first element of v that is NaN or infinite; then r is as it
// was, and the wire is to be thrown away. So all of x is looked at before any of r is written, and where x is so large
// that x + r may overflow, all of r, too. To look at x and r always took about as long as a copy of x, so this is half of
// that. What is left: an r that is itself not finite, or that
// overflows with an x below 2^126, is found on its turn, when what comes before it has been written.
//
// Every decoder adds to `out`. No pointer needs to be aligned; r and out are not x, and overlap nothing else.
// All instruction sets give the same bits: sums are in f64, in a fixed number of lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pt {

// What each instruction set offers.
struct DenseCodes {
    // To nearest even, after what is finite was clamped to ±limit. Without a residual NaN and infinities pass.
    int64_t (*bf16_encode)(const float* x, float* r, float limit, void* wire, int64_t count);
    int64_t (*f16_encode)(const float* x, float* r, float limit, void* wire, int64_t count);
    void (*bf16_add)(const void* wire, float* out, int64_t count);
    void (*f16_add)(const void* wire, float* out, int64_t count);

    // For each block, the last of which may be shorter: scale = max |v| / 127, code = v · (1 / scale) to nearest even.
    // A scale that is not a normal number is 0, and so are the codes.
    int64_t (*int8_encode)(const float* x, float* r, int64_t block, void* scales, void* codes, int64_t count);
    void (*int8_add)(const void* scales, const void* codes, int64_t block, float* out, int64_t count);

    // The same with scale = max |v|, and the code of the nearest of 256 numbers (`table`, ascending) times scale.
    int64_t (*dynamic8_encode)(
        const float* x, float* r, int64_t block, const float* table, void* scales, void* codes, int64_t count);
    void (*dynamic8_add)(
        const void* scales, const void* codes, int64_t block, const float* table, float* out, int64_t count);

    // For each row, the means of its negative and of its other entries (0 where there are none), and a bit for each
    // entry, 1 where it is not negative: element j is bit j % 32 of word j / 32. Rows begin with a new word.
    int64_t (*one_bit_encode)(
        const float* x, float* r, void* means, void* words, int64_t num_rows, int64_t row_length);
    void (*one_bit_add)(const void* means, const void* words, float* out, int64_t num_rows, int64_t row_length);

    // The same bits for one row; what decodes to ±scale, which is Σ|v| / count or, if not `scaled`, 1.
    int64_t (*sign_encode)(const float* x, float* r, bool scaled, void* scale, void* words, int64_t count);
};

} // namespace pt
