// The arithmetic of the native core: reductions, and optimizers fused with them.
//
// Each kernel is compiled once per instruction set (kernels_isa.cpp) and chosen at run time (kernels.cpp). All
// instruction sets give the same bits: no fused multiply-add, every operation rounds as IEEE 754 says. Where a result
// is NaN, its payload is left open.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pt {

enum DType : int32_t { F32 = 0, F64, BF16, F16, I8, U8, I16, I32, I64, BOOL, NUM_DTYPES };
enum Op : int32_t { SUM = 0, AVERAGE, MIN, MAX, PRODUCT, BAND, BOR, BXOR, NUM_OPS };
enum Order : int32_t { LINEAR = 0, TREE = 1 };

size_t bytes_of(DType dtype);

// No bit operations on floats, no average but on floats. Of bools, sum, max and bor are "or", product, min and band
// are "and".
bool supports(DType dtype, Op op);

// Write op over all sources (count elements each) to every one of `outs`.
//
//   LINEAR  ((s0 + s1) + s2) + …
//   TREE    left + right, where left is the same tree over the first 2^k sources, 2^k the largest power below
//           num_sources. Sums of 1, 2, 4, … consecutive leaves compose: in f32 and f64, 8 leaves give the same bits
//           whether one rank holds all of them, or 2, 4 or 8 ranks hold a part each.
//
// bf16 and f16 accumulate in f32 and round once, to nearest even. AVERAGE divides the sum by num_sources, correctly
// rounded in the type of accumulation. Integers wrap around. MIN and MAX give NaN where any source has one, and of
// zeros the first.
//
// An out may be a source (the same pointer), but must not overlap one in part. No pointer needs to be aligned.
// At least one source and one out; the caller has asked `supports`.
// Cost: reads each source once and writes each out once, all else stays in the first-level cache.
void reduce(
    DType dtype, Op op, Order order, void* const* outs, int num_outs, const void* const* sources, int num_sources,
    int64_t count);

// Copy bytes that do not overlap. memcpy of large pieces is `rep movsb` on many systems, which some processors run at a
// tenth of its speed for unlucky pairs of addresses; this is a loop of vectors.
void copy(void* out, const void* source, int64_t num_bytes);

// The same past the caches, where the copy is large and nobody reads it at once: what is overwritten is not read first.
void copy_past_caches(void* out, const void* source, int64_t num_bytes);
constexpr int64_t LARGE_BYTES = 24 << 20; // what all ranks receive together; less may stay in a shared cache

enum Rule : int32_t { SGD = 0, ADAM, ADAMW, ADAGRAD };

// `step` counts from 1. `first`: this step makes SGD's momentum buffer, so m is not read.
struct Hyper {
    double lr, weight_decay, momentum, dampening, beta1, beta2, eps, lr_decay;
    int64_t step;
    int32_t rule, nesterov, maximize, first;
};

// One step of an optimizer on g = Σ weights[r] · gradients[r], as torch.optim defines it.
//
//   SGD      g += decay · p;  m = momentum · m + (1 − dampening) · g;  p −= lr · (nesterov ? g + momentum · m : m)
//   ADAM     g += decay · p;  m += (1 − β1)(g − m);  v = β2 v + (1 − β2) g²
//            p −= lr / (1 − β1^step) · m / (√v / √(1 − β2^step) + eps)
//   ADAMW    p *= 1 − lr · decay, then as ADAM without g += decay · p
//   ADAGRAD  g += decay · p;  v += g²;  p −= lr / (1 + (step − 1) · lr_decay) · g / (√v + eps)
//
// m is SGD's momentum buffer or Adam's exp_avg, v is exp_avg_sq or Adagrad's sum; null where the rule has none.
// A null gradient counts as zero. p_out, m_out and v_out may be p, m and v, but must not overlap anything in part.
// All arithmetic is in f64, and each result rounds once: in f32 it is within 1 ulp of the exact rule.
// Cost: reads p, m, v and each gradient once and writes p, m, v once; no memory but 8 KiB of stack. A large p_out that
// is not p is written past the caches.
void update(
    const Hyper& hyper, const float* const* gradients, const float* weights, int num_gradients, const float* p,
    const float* m, const float* v, float* p_out, float* m_out, float* v_out, int64_t count);
void update(
    const Hyper& hyper, const double* const* gradients, const double* weights, int num_gradients, const double* p,
    const double* m, const double* v, double* p_out, double* m_out, double* v_out, int64_t count);

// The first of `count` floats (F32, F64, BF16 or F16) that is NaN or infinite; -1: all are finite. Reads them once.
int64_t unfinite(DType dtype, const void* data, int64_t count);

// out = p after a step of SGD without momentum on weight · gradient, in the bits of `update`; -1. Or, where the gradient
// has an element that is NaN or infinite, the index of the first: then `out` is to be thrown away. It is not p.
// Cost: as `update`; looking costs nothing where memory is the limit.
int64_t descend(const Hyper& hyper, const float* gradient, float weight, const float* p, float* out, int64_t count);
int64_t descend(const Hyper& hyper, const double* gradient, double weight, const double* p, double* out, int64_t count);

// sums = {Σ a², Σ b²}, in f64. Cost: reads both once.
void squares(const float* a, const float* b, double* sums, int64_t count);
void squares(const double* a, const double* b, double* sums, int64_t count);

// What LAMB would move by, but for the rate and the ratio of norms, and the squares that make the ratio:
//
//   m += (1 − β1)(g − m);  v = β2 v + (1 − β2) g²;  u = m / (1 − β1^step) / (√v / √(1 − β2^step) + eps) + decay · w
//   sums = {Σ w², Σ u²}, of u as it is rounded
//
// Nothing may overlap. All is computed in the tensors' type, each operation rounded; sums of 512 elements are then
// added up in f64. Cost: reads g, w, m and v once and writes m, v and u once.
void lamb_direction(
    const Hyper& hyper, const float* gradient, const float* weights, float* m, float* v, float* direction, double* sums,
    int64_t count);
void lamb_direction(
    const Hyper& hyper, const double* gradient, const double* weights, double* m, double* v, double* direction,
    double* sums, int64_t count);

struct DenseCodes;
struct SparseCodes;
struct DrawnCodes;

// What each instruction set offers.
struct Kernels {
    const char* name;
    void (*reduce)(DType, Op, Order, void* const*, int, const void* const*, int, int64_t);
    void (*copy)(void*, const void*, int64_t);
    void (*copy_past_caches)(void*, const void*, int64_t);
    void (*update_f32)(
        const Hyper&, const float* const*, const float*, int, const float*, const float*, const float*, float*, float*,
        float*, int64_t);
    void (*update_f64)(
        const Hyper&, const double* const*, const double*, int, const double*, const double*, const double*, double*,
        double*, double*, int64_t);
    int64_t (*unfinite)(DType, const void*, int64_t);
    int64_t (*descend_f32)(const Hyper&, const float*, float, const float*, float*, int64_t);
    int64_t (*descend_f64)(const Hyper&, const double*, double, const double*, double*, int64_t);
    void (*squares_f32)(const float*, const float*, double*, int64_t);
    void (*squares_f64)(const double*, const double*, double*, int64_t);
    void (*lamb_f32)(const Hyper&, const float*, const float*, float*, float*, float*, double*, int64_t);
    void (*lamb_f64)(const Hyper&, const double*, const double*, double*, double*, double*, double*, int64_t);
    const DenseCodes* dense;
    const SparseCodes* sparse;
    const DrawnCodes* drawn;
};

const Kernels& kernels_in_use();

} // namespace pt
