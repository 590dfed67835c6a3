// Which kernels there are, which of them the machine can run, and which are in use.
#include "kernels.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels_abi.h"

namespace pt {

namespace baseline { extern const Kernels kernels; }
#ifdef PT_WITH_V3
namespace v3 { extern const Kernels kernels; }
#endif
#ifdef PT_WITH_V4
namespace v4 { extern const Kernels kernels; }
#endif

namespace {

#ifdef PT_WITH_V3
bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
           __builtin_cpu_supports("movbe");
}
#endif
#ifdef PT_WITH_V4
bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The kernels of that name, or the best where it is null; null if the machine or this build lacks them.
const Kernels* find(const char* name) {
    auto wanted = [name](const Kernels& kernels) { return !name || std::strcmp(name, kernels.name) == 0; };
#ifdef PT_WITH_V4
    if (wanted(v4::kernels) && has_v4()) return &v4::kernels;
#endif
#ifdef PT_WITH_V3
    if (wanted(v3::kernels) && has_v3()) return &v3::kernels;
#endif
    return wanted(baseline::kernels) ? &baseline::kernels : nullptr;
}

// Written once by whoever comes first (all would write the same), or by pt_choose_isa. The tables are constants of
// the program, so nothing has to be published with the pointer.
std::atomic<const Kernels*> in_use{nullptr};

const Kernels& kernels() {
    const Kernels* chosen = in_use.load(std::memory_order_relaxed);
    if (chosen) return *chosen;
    const char* named = std::getenv("POLYTEMPO_ISA");
    chosen = named ? find(named) : nullptr;
    if (!chosen) chosen = find(nullptr);
    in_use.store(chosen, std::memory_order_relaxed);
    return *chosen;
}

} // namespace

const Kernels& kernels_in_use() { return kernels(); }

size_t bytes_of(DType dtype) {
    constexpr size_t BYTES[NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
    return BYTES[dtype];
}

bool supports(DType dtype, Op op) {
    if (dtype < 0 || dtype >= NUM_DTYPES || op < 0 || op >= NUM_OPS) return false;
    bool is_float = dtype <= F16;
    return is_float ? op < BAND : op != AVERAGE;
}

void reduce(
    DType dtype, Op op, Order order, void* const* outs, int num_outs, const void* const* sources, int num_sources,
    int64_t count) {
    kernels().reduce(dtype, op, order, outs, num_outs, sources, num_sources, count);
}

void copy(void* out, const void* source, int64_t num_bytes) { kernels().copy(out, source, num_bytes); }

void copy_past_caches(void* out, const void* source, int64_t num_bytes) {
    kernels().copy_past_caches(out, source, num_bytes);
}

void update(
    const Hyper& hyper, const float* const* gradients, const float* weights, int num_gradients, const float* p,
    const float* m, const float* v, float* p_out, float* m_out, float* v_out, int64_t count) {
    kernels().update_f32(hyper, gradients, weights, num_gradients, p, m, v, p_out, m_out, v_out, count);
}

void update(
    const Hyper& hyper, const double* const* gradients, const double* weights, int num_gradients, const double* p,
    const double* m, const double* v, double* p_out, double* m_out, double* v_out, int64_t count) {
    kernels().update_f64(hyper, gradients, weights, num_gradients, p, m, v, p_out, m_out, v_out, count);
}

int64_t unfinite(DType dtype, const void* data, int64_t count) { return kernels().unfinite(dtype, data, count); }

int64_t descend(const Hyper& hyper, const float* gradient, float weight, const float* p, float* out, int64_t count) {
    return kernels().descend_f32(hyper, gradient, weight, p, out, count);
}

int64_t descend(const Hyper& hyper, const double* gradient, double weight, const double* p, double* out, int64_t count) {
    return kernels().descend_f64(hyper, gradient, weight, p, out, count);
}

void squares(const float* a, const float* b, double* sums, int64_t count) { kernels().squares_f32(a, b, sums, count); }

void squares(const double* a, const double* b, double* sums, int64_t count) { kernels().squares_f64(a, b, sums, count); }

void lamb_direction(
    const Hyper& hyper, const float* gradient, const float* weights, float* m, float* v, float* direction, double* sums,
    int64_t count) {
    kernels().lamb_f32(hyper, gradient, weights, m, v, direction, sums, count);
}

void lamb_direction(
    const Hyper& hyper, const double* gradient, const double* weights, double* m, double* v, double* direction,
    double* sums, int64_t count) {
    kernels().lamb_f64(hyper, gradient, weights, m, v, direction, sums, count);
}

namespace {

template <class T>
void lamb_any(
    const Hyper& hyper, const void* gradient, const void* weights, void* m, void* v, void* direction, double* sums,
    int64_t count) {
    lamb_direction(
        hyper, static_cast<const T*>(gradient), static_cast<const T*>(weights), static_cast<T*>(m), static_cast<T*>(v),
        static_cast<T*>(direction), sums, count);
}

template <class T>
void update_any(
    const Hyper& hyper, const void* const* gradients, const void* weights, int num_gradients, const void* p,
    const void* m, const void* v, void* p_out, void* m_out, void* v_out, int64_t count) {
    update(
        hyper, reinterpret_cast<const T* const*>(gradients), static_cast<const T*>(weights), num_gradients,
        static_cast<const T*>(p), static_cast<const T*>(m), static_cast<const T*>(v), static_cast<T*>(p_out),
        static_cast<T*>(m_out), static_cast<T*>(v_out), count);
}

template <class T>
int64_t descend_any(const Hyper& hyper, const void* gradient, double weight, const void* p, void* out, int64_t count) {
    return descend(
        hyper, static_cast<const T*>(gradient), T(weight), static_cast<const T*>(p), static_cast<T*>(out), count);
}

Hyper made(const pt_hyper& h) {
    return {
        h.lr, h.weight_decay, h.momentum, h.dampening, h.beta1, h.beta2, h.eps, h.lr_decay, h.step, h.rule, h.nesterov,
        h.maximize, h.first};
}

} // namespace
} // namespace pt

const char* pt_isa(void) { return pt::kernels().name; }

int32_t pt_choose_isa(const char* name) {
    const pt::Kernels* found = name ? pt::find(name) : nullptr;
    if (!found) return 1;
    pt::in_use.store(found, std::memory_order_relaxed);
    return 0;
}

int32_t pt_reduce(
    int32_t dtype, int32_t op, int32_t order, void* const* outs, int32_t num_outs, const void* const* sources,
    int32_t num_sources, int64_t count) {
    bool is_order = order == pt::LINEAR || order == pt::TREE;
    if (!pt::supports(pt::DType(dtype), pt::Op(op)) || !is_order || num_outs < 1 || num_sources < 1 || count < 0) return 1;
    pt::reduce(pt::DType(dtype), pt::Op(op), pt::Order(order), outs, num_outs, sources, num_sources, count);
    return 0;
}

int32_t pt_update(
    int32_t dtype, const pt_hyper* hyper, const void* const* gradients, const void* weights, int32_t num_gradients,
    const void* p, const void* m, const void* v, void* p_out, void* m_out, void* v_out, int64_t count) {
    bool is_rule = hyper->rule >= pt::SGD && hyper->rule <= pt::ADAGRAD;
    if ((dtype != pt::F32 && dtype != pt::F64) || !is_rule || num_gradients < 0 || count < 0) return 1;
    (dtype == pt::F32 ? pt::update_any<float> : pt::update_any<double>)(
        pt::made(*hyper), gradients, weights, num_gradients, p, m, v, p_out, m_out, v_out, count);
    return 0;
}

int64_t pt_unfinite(int32_t dtype, const void* data, int64_t count) {
    if (dtype < pt::F32 || dtype > pt::F16 || count < 0) return -2;
    return pt::unfinite(pt::DType(dtype), data, count);
}

void pt_copy(void* out, const void* source, int64_t num_bytes) {
    (num_bytes >= pt::LARGE_BYTES ? pt::copy_past_caches : pt::copy)(out, source, num_bytes);
}

int64_t pt_descend(
    int32_t dtype, const pt_hyper* hyper, const void* gradient, double weight, const void* p, void* out, int64_t count) {
    bool is_plain = hyper->rule == pt::SGD && hyper->momentum == 0;
    if ((dtype != pt::F32 && dtype != pt::F64) || !is_plain || count < 0) return -2;
    return (dtype == pt::F32 ? pt::descend_any<float> : pt::descend_any<double>)(
        pt::made(*hyper), gradient, weight, p, out, count);
}

int32_t pt_squares(int32_t dtype, const void* a, const void* b, double* sums, int64_t count) {
    if ((dtype != pt::F32 && dtype != pt::F64) || count < 0) return 1;
    if (dtype == pt::F32)
        pt::squares(static_cast<const float*>(a), static_cast<const float*>(b), sums, count);
    else
        pt::squares(static_cast<const double*>(a), static_cast<const double*>(b), sums, count);
    return 0;
}

int32_t pt_lamb_direction(
    int32_t dtype, const pt_hyper* hyper, const void* gradient, const void* weights, void* m, void* v, void* direction,
    double* sums, int64_t count) {
    if ((dtype != pt::F32 && dtype != pt::F64) || count < 0) return 1;
    (dtype == pt::F32 ? pt::lamb_any<float> : pt::lamb_any<double>)(
        pt::made(*hyper), gradient, weights, m, v, direction, sums, count);
    return 0;
}
