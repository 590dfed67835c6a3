// The C interface of codes_drawn.h, where everything is explained.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int32_t width, positions, words;
} pt_fields;

__attribute__((visibility("default"))) int64_t pt_qsgd_encode(
    const float* x, float* residual, int64_t count, int64_t bucket, int32_t levels, const pt_fields* fields, uint64_t key,
    void* wire);
__attribute__((visibility("default"))) void pt_qsgd_decode(
    const void* wire, float* out, int64_t count, int64_t bucket, int32_t levels, const pt_fields* fields, int32_t add);

__attribute__((visibility("default"))) int64_t pt_terngrad_scaler(
    const float* x, const float* residual, int64_t count, double clip, float* scaler);
__attribute__((visibility("default"))) void pt_terngrad_encode(
    const float* x, float* residual, int64_t count, float own, float scaler, const pt_fields* fields, uint64_t key,
    void* words);
__attribute__((visibility("default"))) void pt_terngrad_decode(
    const void* words, float* out, int64_t count, float scaler, int32_t terms, const pt_fields* fields, int32_t add);

__attribute__((visibility("default"))) int64_t pt_natural_encode(
    const float* x, float* residual, int64_t count, uint64_t key, void* wire);
__attribute__((visibility("default"))) void pt_natural_decode(
    const void* wire, float* out, int64_t count, int32_t add);

#ifdef __cplusplus
}
#endif
