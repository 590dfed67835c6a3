// The C interface of codes_dense.h, with the instruction set in use.
#include "codes_dense.h"

#include "codes_dense_abi.h"
#include "kernels.h"

namespace pt {
namespace {

const DenseCodes& codes() { return *kernels_in_use().dense; }

bool is_half(int32_t dtype) { return dtype == BF16 || dtype == F16; }

} // namespace
} // namespace pt

int64_t pt_cast_encode(int32_t dtype, const float* x, float* residual, float limit, void* wire, int64_t count) {
    if (!pt::is_half(dtype)) return -2;
    return (dtype == pt::BF16 ? pt::codes().bf16_encode : pt::codes().f16_encode)(x, residual, limit, wire, count);
}

int32_t pt_cast_add(int32_t dtype, const void* wire, float* out, int64_t count) {
    if (!pt::is_half(dtype)) return 1;
    (dtype == pt::BF16 ? pt::codes().bf16_add : pt::codes().f16_add)(wire, out, count);
    return 0;
}

int64_t pt_int8_encode(const float* x, float* residual, int64_t block, void* scales, void* codes, int64_t count) {
    return block < 1 ? -2 : pt::codes().int8_encode(x, residual, block, scales, codes, count);
}

int32_t pt_int8_add(const void* scales, const void* codes, int64_t block, float* out, int64_t count) {
    if (block < 1) return 1;
    pt::codes().int8_add(scales, codes, block, out, count);
    return 0;
}

int64_t pt_dynamic8_encode(
    const float* x, float* residual, int64_t block, const float* table, void* scales, void* codes, int64_t count) {
    return block < 1 ? -2 : pt::codes().dynamic8_encode(x, residual, block, table, scales, codes, count);
}

int32_t pt_dynamic8_add(
    const void* scales, const void* codes, int64_t block, const float* table, float* out, int64_t count) {
    if (block < 1) return 1;
    pt::codes().dynamic8_add(scales, codes, block, table, out, count);
    return 0;
}

int64_t pt_one_bit_encode(
    const float* x, float* residual, void* means, void* words, int64_t num_rows, int64_t row_length) {
    return pt::codes().one_bit_encode(x, residual, means, words, num_rows, row_length);
}

int32_t pt_one_bit_add(const void* means, const void* words, float* out, int64_t num_rows, int64_t row_length) {
    pt::codes().one_bit_add(means, words, out, num_rows, row_length);
    return 0;
}

int64_t pt_sign_encode(const float* x, float* residual, int32_t scaled, void* scale, void* words, int64_t count) {
    return pt::codes().sign_encode(x, residual, scaled != 0, scale, words, count);
}
