// One copy of the weights and of the optimizer's state for all ranks of a host. See step.cpp.
#pragma once

#include <stdint.h>

#include "kernels_abi.h"
#include "polytempo.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pt_plan pt_plan;

typedef struct {
    int64_t offset;   // bytes from the beginning of each of the three blocks
    int64_t gradient; // bytes from the beginning of each rank's gradients; -1: its gradient comes as rows
    int64_t count, width; // elements, and elements of a row
    int32_t dtype;    // 0 f32, 1 f64
    int32_t group;    // its hyper-parameters
} pt_tensor;

typedef struct {
    const pt_tensor* tensors;
    int64_t num_tensors;
    void* blocks[3]; // parameters, first and second moments; null where the rule has none
    void* const* gradients; // each rank's, in its arena
    void* const* notes;     // pt_notes_bytes(num_tensors) of each rank
    void* const* logs;      // pt_log_bytes() of each rank
} pt_plan_place;

typedef struct {
    int64_t rows;   // where count int64 lie in this rank's arena, in bytes: the rows that the gradient touches
    int64_t values; // where count * width elements lie: what it adds there; a row may occur several times
    int64_t count;
} pt_rows;

// What a rank brings to a step: its gradients count `weight` times; used[i] says whether tensor i has one.
typedef struct {
    double weight;
    const uint8_t* used;
    const pt_rows* rows; // of each tensor; read where the gradient comes as rows
} pt_part;

PT_EXPORT int64_t pt_notes_bytes(int64_t num_tensors);
PT_EXPORT int64_t pt_log_bytes(void);
PT_EXPORT int64_t pt_most_row_bytes(void); // wider rows cannot be updated row by row
PT_EXPORT pt_plan* pt_plan_open(pt_group* group, const pt_plan_place* place);
PT_EXPORT void pt_plan_close(pt_plan* plan);

// One step of the optimizer on the weighted sum of all ranks' gradients. `steps` counts the steps of each tensor, and
// is counted on here; a tensor without a gradient on any rank is left alone. hypers[g].step and .first are not read.
//
// `done` says afterwards whether the step was made. With status 1 (a rank is lost) it may be 1: the others have made
// the lost rank's part. It is 0 there where the loss came before all had met, and then nothing was changed. It is
// also 0 where a rank left in mid-step, but its process goes on, and its part was not made before the deadline: only
// of a process that has ended can others make the part, for another may still be writing. With 3 nothing was changed.
//
// With status 2 (late) `done` is 0, and yet the others may complete the step: they do when this rank made its part
// and stopped waiting for theirs. The copy may then be one step ahead of `steps`, or between two where a part is
// still being made. So after status 2, as after 1 with 0 in mid-step, go on from saved weights, not from the copy.
PT_EXPORT int32_t pt_step(
    pt_group* group, pt_plan* plan, const pt_part* part, const pt_hyper* hypers, int64_t num_groups, float* steps,
    double timeout_s, int32_t* done);

// The Euclidean norm of the weighted sum of all ranks' gradients. It has the same bits on every rank.
PT_EXPORT int32_t pt_norm(pt_group* group, pt_plan* plan, const pt_part* part, double timeout_s, double* norm);

// For optimizers that step each tensor by its own norm: sums[2 i] = Σ w², the squares of tensor i's weights, and
// sums[2 i + 1] = Σ x², the same bits on every rank. x is the weighted sum of all ranks' gradients, where hypers is null,
// else what pt_step would move w by but for its rate: m̂ / (√v̂ + eps) + decay · w, of the moments as they will be. Both
// are 0 of a tensor without a gradient. Nothing of the copy changes; no gradient may come as rows. `steps` as in pt_step.
PT_EXPORT int32_t pt_layer_squares(
    pt_group* group, pt_plan* plan, const pt_part* part, const pt_hyper* hypers, int64_t num_groups, const float* steps,
    double timeout_s, double* sums);

#ifdef __cplusplus
}
#endif
