// The norm of the gradient that a step would take, of all tensors or of each: each rank squares its slice, all add the
// sums up in the same order.
#include <algorithm>

#include "plan.h"

namespace pt {

// Σᵢ (Σᵣ wᵣ gᵣᵢ)² over `count` elements, in blocks that stay in the first-level cache.
template <class T>
static double sum_of_squares(const T* const* gradients, const T* weights, int num_gradients, int64_t count) {
    constexpr int64_t BLOCK = 512;
    double lanes[8] = {};
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t length = std::min(BLOCK, count - begin);
        double sum[BLOCK] = {};
        for (int r = 0; r < num_gradients; ++r)
            for (int64_t i = 0; gradients[r] && i < length; ++i)
                sum[i] += static_cast<double>(weights[r]) * static_cast<double>(gradients[r][begin + i]);
        for (int64_t i = 0; i < BLOCK; i += 8)
            for (int lane = 0; lane < 8; ++lane) lanes[lane] += sum[i + lane] * sum[i + lane];
    }
    double total = 0;
    for (const double lane : lanes) total += lane;
    return total;
}

template <class T> static double squares_of_rows(const Group& group, Plan& plan, int64_t index) {
    const int64_t count = gather_rows<T>(group, plan, index, group.rank);
    const auto* pointers = reinterpret_cast<const T* const*>(plan.scratch.pointers);
    const auto* weights = reinterpret_cast<const T*>(plan.scratch.weights);
    double total = 0;
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
        end = end_of_row(plan.scratch, begin, count);
        total += sum_of_squares(
            pointers + begin, weights + begin, static_cast<int>(end - begin), plan.tensors[index].width);
    }
    return total;
}

template <class T> static double squares_of_piece(const Group& group, const Plan& plan, const Piece& piece) {
    Gradients<T> gradients;
    find(group, plan, piece, gradients);
    return sum_of_squares(gradients.pointers, gradients.weights, group.size, piece.count);
}

static double squares_of_slice(const Group& group, Plan& plan) {
    double total = 0;
    for (int64_t i = plan.firsts[group.rank]; i < plan.firsts[group.rank + 1]; ++i) {
        const Piece& piece = plan.pieces[i];
        const bool wide = plan.tensors[piece.tensor].dtype == F64;
        total += wide ? squares_of_piece<double>(group, plan, piece) : squares_of_piece<float>(group, plan, piece);
    }
    for (int64_t i = 0; i < plan.num_tensors; ++i) {
        if (plan.tensors[i].gradient >= 0 || !plan.used[i]) continue;
        const bool wide = plan.tensors[i].dtype == F64;
        total += wide ? squares_of_rows<double>(group, plan, i) : squares_of_rows<float>(group, plan, i);
    }
    return total;
}

// ------------------------------------------------------------------------------------------------------- by tensors

// What Adam with these hyper-parameters and rate 1 would move `piece` by, into `out`, but for the weight decay. The log
// of a rank is its own, and empty, until a step begins.
template <class T>
static void adam_direction(
    const Plan& plan, const Piece& piece, const Gradients<T>& gradients, int size, Hyper hyper, Log& log, T*& out) {
    alignas(64) static const char zeros[RECORD_BYTES] = {};
    const int64_t offset = plan.tensors[piece.tensor].offset + piece.begin * static_cast<int64_t>(sizeof(T));
    auto moments = [&](BlockName block) { return reinterpret_cast<const T*>(plan.blocks[block] + offset); };
    auto scratch = [&](BlockName block) { return reinterpret_cast<T*>(log.data + block * RECORD_BYTES); };
    hyper.rule = ADAM;
    hyper.lr = 1;
    hyper.weight_decay = 0;
    out = scratch(PARAMETER);
    update(
        hyper, gradients.pointers, gradients.weights, size, reinterpret_cast<const T*>(zeros), moments(FIRST),
        moments(SECOND), out, scratch(FIRST), scratch(SECOND), piece.count);
}

// Σ (decay · w − moved)², in lanes as above; moved is from zero, so its sign is the other one.
template <class T> static double sum_of_moves(const T* weights, const T* moved, double decay, int64_t count) {
    double lanes[8] = {};
    for (int64_t i = 0; i < count; ++i) {
        const double x = decay * static_cast<double>(weights[i]) - static_cast<double>(moved[i]);
        lanes[i % 8] += x * x;
    }
    double total = 0;
    for (const double lane : lanes) total += lane;
    return total;
}

template <class T>
static void add_squares_of_piece(
    Group& group, Plan& plan, const Piece& piece, const pt_hyper* hypers, const float* steps) {
    Gradients<T> gradients;
    find(group, plan, piece, gradients);
    const pt_tensor& tensor = plan.tensors[piece.tensor];
    const T* weights = reinterpret_cast<const T*>(plan.blocks[PARAMETER] + tensor.offset) + piece.begin;
    double* sums = plan.notes[group.rank]->of(piece.tensor).squares;
    sums[0] += sum_of_moves(weights, weights, 0, piece.count);
    if (!hypers) {
        sums[1] += sum_of_squares(gradients.pointers, gradients.weights, group.size, piece.count);
        return;
    }
    const Hyper hyper = hyper_of(hypers[tensor.group], steps[piece.tensor]);
    T* moved = nullptr;
    adam_direction(plan, piece, gradients, group.size, hyper, *plan.logs[group.rank], moved);
    sums[1] += sum_of_moves(weights, moved, hyper.weight_decay, piece.count);
}

} // namespace pt

using namespace pt;

int32_t pt_norm(pt_group* group_handle, pt_plan* plan_handle, const pt_part* part, double timeout_s, double* norm) {
    auto& group = *reinterpret_cast<Group*>(group_handle);
    auto& plan = *reinterpret_cast<Plan*>(plan_handle);
    if (group.broken != FINE) return BROKEN;
    const int64_t deadline_ns = deadline_after(timeout_s);
    Status status = begin(group, plan, *part, 1, 0, deadline_ns);
    if (status != FINE) return status;
    plan.notes[group.rank]->sum_of_squares = squares_of_slice(group, plan);
    status = meet(group, deadline_ns);
    if (status != FINE) return status;
    double total = 0;
    for (int rank = 0; rank < group.size; ++rank) total += plan.notes[rank]->sum_of_squares;
    *norm = __builtin_sqrt(total);
    return meet(group, deadline_ns); // whoever drops its plan now takes its notes along
}

int32_t pt_layer_squares(
    pt_group* group_handle, pt_plan* plan_handle, const pt_part* part, const pt_hyper* hypers, int64_t num_groups,
    const float* steps, double timeout_s, double* sums) {
    auto& group = *reinterpret_cast<Group*>(group_handle);
    auto& plan = *reinterpret_cast<Plan*>(plan_handle);
    if (group.broken != FINE) return BROKEN;
    const int64_t deadline_ns = deadline_after(timeout_s);
    uint64_t agreed = hash(num_groups, steps, plan.num_tensors * sizeof(float));
    if (hypers) agreed = hash(agreed, hypers, num_groups * sizeof(pt_hyper));
    Status status = begin(group, plan, *part, 2, agreed, deadline_ns);
    if (status != FINE) return status;
    for (int64_t i = plan.firsts[group.rank]; i < plan.firsts[group.rank + 1]; ++i) {
        const Piece& piece = plan.pieces[i];
        if (!plan.used[piece.tensor]) continue;
        const bool wide = plan.tensors[piece.tensor].dtype == F64;
        (wide ? add_squares_of_piece<double> : add_squares_of_piece<float>)(group, plan, piece, hypers, steps);
    }
    status = meet(group, deadline_ns);
    if (status != FINE) return status;
    for (int64_t i = 0; i < 2 * plan.num_tensors; ++i) {
        sums[i] = 0;
        for (int rank = 0; rank < group.size; ++rank) sums[i] += plan.notes[rank]->of(i / 2).squares[i % 2];
    }
    return meet(group, deadline_ns); // as above
}
