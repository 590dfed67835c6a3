// The kernels' own C interface: which instruction set they use, and each of them alone, for tests and measurements.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    double lr, weight_decay, momentum, dampening, beta1, beta2, eps, lr_decay;
    int64_t step;
    int32_t rule, nesterov, maximize, first;
} pt_hyper;

// The instruction set in use: "v4" or "v3" (levels of x86-64), or "baseline". The first call of any kernel takes the
// best that the machine has, or what POLYTEMPO_ISA names in the environment if the machine has that.
__attribute__((visibility("default"))) const char* pt_isa(void);

// Use another one from now on. 0: fine; 1: the machine or this build lacks it, nothing changes.
__attribute__((visibility("default"))) int32_t pt_choose_isa(const char* name);

// See pt::reduce and pt::update in kernels.h. 0: fine; 1: dtype, op, order, rule or a number of things is impossible,
// nothing was done.
__attribute__((visibility("default"))) int32_t pt_reduce(
    int32_t dtype, int32_t op, int32_t order, void* const* outs, int32_t num_outs, const void* const* sources,
    int32_t num_sources, int64_t count);

__attribute__((visibility("default"))) int32_t pt_update(
    int32_t dtype, const pt_hyper* hyper, const void* const* gradients, const void* weights, int32_t num_gradients,
    const void* p, const void* m, const void* v, void* p_out, void* m_out, void* v_out, int64_t count);

// See pt::squares and pt::lamb_direction. 0: fine; 1: dtype or count is impossible, nothing was done.
__attribute__((visibility("default"))) int32_t pt_squares(
    int32_t dtype, const void* a, const void* b, double* sums, int64_t count);

__attribute__((visibility("default"))) int32_t pt_lamb_direction(
    int32_t dtype, const pt_hyper* hyper, const void* gradient, const void* weights, void* m, void* v, void* direction,
    double* sums, int64_t count);

// The index of the first element that is NaN or infinite; -1: there is none; -2: not a type of floats.
__attribute__((visibility("default"))) int64_t pt_unfinite(int32_t dtype, const void* data, int64_t count);

// Copy bytes that do not overlap, past the caches where they are many.
__attribute__((visibility("default"))) void pt_copy(void* out, const void* source, int64_t num_bytes);

// See pt::descend. -2: dtype or rule is impossible, or there is a momentum; nothing was done.
__attribute__((visibility("default"))) int64_t pt_descend(
    int32_t dtype, const pt_hyper* hyper, const void* gradient, double weight, const void* p, void* out, int64_t count);

#ifdef __cplusplus
}
#endif
