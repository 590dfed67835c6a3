// The C interface of the dense codes, for src/polytempo/native/kernels/codes_dense.py. See codes_dense.h.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Encoders answer -1, or the index of the first element that is NaN or infinite; -2: dtype or block is impossible,
// nothing was done. dtype: 2 is bf16, 3 is f16.
__attribute__((visibility("default"))) int64_t pt_cast_encode(
    int32_t dtype, const float* x, float* residual, float limit, void* wire, int64_t count);
__attribute__((visibility("default"))) int32_t pt_cast_add(int32_t dtype, const void* wire, float* out, int64_t count);

__attribute__((visibility("default"))) int64_t pt_int8_encode(
    const float* x, float* residual, int64_t block, void* scales, void* codes, int64_t count);
__attribute__((visibility("default"))) int32_t pt_int8_add(
    const void* scales, const void* codes, int64_t block, float* out, int64_t count);

__attribute__((visibility("default"))) int64_t pt_dynamic8_encode(
    const float* x, float* residual, int64_t block, const float* table, void* scales, void* codes, int64_t count);
__attribute__((visibility("default"))) int32_t pt_dynamic8_add(
    const void* scales, const void* codes, int64_t block, const float* table, float* out, int64_t count);

__attribute__((visibility("default"))) int64_t pt_one_bit_encode(
    const float* x, float* residual, void* means, void* words, int64_t num_rows, int64_t row_length);
__attribute__((visibility("default"))) int32_t pt_one_bit_add(
    const void* means, const void* words, float* out, int64_t num_rows, int64_t row_length);

__attribute__((visibility("default"))) int64_t pt_sign_encode(
    const float* x, float* residual, int32_t scaled, void* scale, void* words, int64_t count);

#ifdef __cplusplus
}
#endif
