// One copy of the weights and of the optimizer's state for all ranks of a host.
//
//   arena of rank 0    parameters │ first moments │ second moments     (three blocks, the same offsets in each)
//   each rank's arena  gradients │ notes: weight, which tensors have a gradient, where rows lie │ log
//
//   write notes ── meet ── own slice:  all ranks' gradients ─▶ log ─▶ the one copy, record by record ── meet
//
// Until all have met nobody writes, so a rank that dies before costs nothing but its step. Once all have met, the step
// will be made, whoever dies. A slice is made of records: a piece of a tensor, or some rows of one. A record is
// computed into the log, declared complete, copied into place, declared placed. The next one is computed only then.
//
//   complete 7, placed 7    record 8 may have been begun: the copy does not show it, so it is computed anew
//   complete 8, placed 7    record 8 may lie in place in part: it is copied again
//
// The lowest living rank goes on where the log ends, in the same log, so that the next one can go on after it.
//
// A process ends between two instructions: what they stored before is seen by all, and nothing of what would have
// come. So only the compiler must keep the order in the log, and the end of the process is what others wait for.
#include <algorithm>
#include <cstring>

#include "plan.h"

namespace pt {

// ------------------------------------------------------------------------------------------------------------- a slice

// The part of a step that is `rank`'s: made by that rank, or, if it is lost, by another.
struct Slice {
    Group& group;
    Plan& plan;
    const pt_hyper* hypers;
    const float* steps;
    int rank;
    Log& log = *plan.logs[rank];
    int64_t record = 0;

    bool is_next() { return ++record > log.complete.load(std::memory_order_relaxed); }

    void copy_into_place() {
        const char* from = log.data;
        for (int64_t i = 0; i < log.num_copies; from += log.copies[i++].num_bytes)
            copy(plan.blocks[log.copies[i].block] + log.copies[i].offset, from, log.copies[i].num_bytes);
        // release: after the copies. Nothing of the next record may be stored before.
        log.placed.store(log.complete.load(std::memory_order_relaxed), std::memory_order_release);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        log.num_copies = log.num_bytes = 0;
    }

    void publish() {
        if (!log.num_copies) return;
        log.complete.store(record, std::memory_order_release); // after everything that the record holds
        std::atomic_signal_fence(std::memory_order_seq_cst);
        copy_into_place();
    }

    template <class T> T* logged(bool wanted, BlockName block, int64_t offset, int64_t count) {
        if (!wanted) return nullptr;
        const auto num_bytes = static_cast<int32_t>(count * sizeof(T));
        log.copies[log.num_copies++] = {block, num_bytes, offset};
        log.num_bytes += num_bytes;
        return reinterpret_cast<T*>(log.data + log.num_bytes - num_bytes);
    }

    template <class T> const T* at(BlockName block, int64_t offset) const {
        return plan.blocks[block] ? reinterpret_cast<const T*>(plan.blocks[block] + offset) : nullptr;
    }

    // Add the update of `count` elements to the record.
    template <class T>
    void update_elements(
        int64_t index, int64_t begin, int64_t count, const T* const* gradients, const T* weights, int num_gradients) {
        const pt_tensor& tensor = plan.tensors[index];
        const Hyper hyper = hyper_of(hypers[tensor.group], steps[index]);
        const bool adam = hyper.rule == ADAM || hyper.rule == ADAMW;
        const int64_t offset = tensor.offset + begin * static_cast<int64_t>(sizeof(T));
        T* p = logged<T>(true, PARAMETER, offset, count);
        T* m = logged<T>(adam || (hyper.rule == SGD && hyper.momentum != 0), FIRST, offset, count);
        T* v = logged<T>(adam || hyper.rule == ADAGRAD, SECOND, offset, count);
        update(
            hyper, gradients, weights, num_gradients, at<T>(PARAMETER, offset), at<T>(FIRST, offset),
            at<T>(SECOND, offset), p, m, v, count);
    }

    template <class T> void update_piece(const Piece& piece) {
        Gradients<T> gradients;
        find(group, plan, piece, gradients);
        update_elements(piece.tensor, piece.begin, piece.count, gradients.pointers, gradients.weights, group.size);
        publish();
    }

    template <class T> void update_rows(int64_t index) {
        const int64_t width = plan.tensors[index].width;
        const int64_t most = std::min<int64_t>(MOST_COPIES / BLOCKS, RECORD_BYTES / (width * sizeof(T)));
        const int64_t count = gather_rows<T>(group, plan, index, rank);
        const auto* pointers = reinterpret_cast<const T* const*>(plan.scratch.pointers);
        const auto* weights = reinterpret_cast<const T*>(plan.scratch.weights);
        for (int64_t begin = 0; begin < count;) {
            const bool next = is_next();
            for (int64_t rows = 0; rows < most && begin < count; ++rows) {
                const int64_t end = end_of_row(plan.scratch, begin, count);
                if (next)
                    update_elements(
                        index, plan.scratch.entries[begin].row * width, width, pointers + begin, weights + begin,
                        static_cast<int>(end - begin));
                begin = end;
            }
            publish();
        }
    }

    void run() {
        if (log.complete.load(std::memory_order_acquire) != log.placed.load(std::memory_order_acquire))
            copy_into_place();
        log.num_copies = log.num_bytes = 0; // of a record that was begun
        for (int64_t i = plan.firsts[rank]; i < plan.firsts[rank + 1]; ++i) {
            const Piece& piece = plan.pieces[i];
            if (!is_next() || !plan.used[piece.tensor]) continue;
            plan.tensors[piece.tensor].dtype == F64 ? update_piece<double>(piece) : update_piece<float>(piece);
        }
        for (int64_t i = 0; i < plan.num_tensors; ++i) {
            if (plan.tensors[i].gradient >= 0 || !plan.used[i]) continue;
            plan.tensors[i].dtype == F64 ? update_rows<double>(i) : update_rows<float>(i);
        }
        log.finished.store(group.number, std::memory_order_release);
    }
};

// -------------------------------------------------------------------------------------------------------------- meeting

static bool all_finished(const Group& group, const Plan& plan) {
    for (int rank = 0; rank < group.size; ++rank)
        if (plan.logs[rank]->finished.load(std::memory_order_acquire) != group.number) return false;
    return true;
}

static bool is_lowest_living(const Group& group) {
    for (int rank = 0; rank < group.rank; ++rank)
        if (!has_ended(group, rank)) return false;
    return true;
}

// A rank is lost in mid-step: wait until every slice is made, and make those of the dead if no lower rank lives.
// Who has ended stays so: at no time do two ranks take themselves for the lowest. Who has only left may still be
// writing, so nobody takes its place: it finishes its slice, or the deadline comes.
static bool recover(Group& group, Plan& plan, const pt_hyper* hypers, const float* steps, int64_t deadline_ns) {
    std::atomic<uint32_t> nobody{0};
    while (!all_finished(group, plan)) {
        if (now_ns() > deadline_ns) return false;
        bool waits = true;
        for (int rank = 0; is_lowest_living(group) && rank < group.size; ++rank)
            if (plan.logs[rank]->finished.load(std::memory_order_acquire) != group.number && has_ended(group, rank)) {
                Slice{group, plan, hypers, steps, rank}.run();
                waits = false;
            }
        if (waits) sleep_on(nobody, 0, 1'000'000);
    }
    return true;
}

} // namespace pt

using namespace pt;

int32_t pt_step(
    pt_group* group_handle, pt_plan* plan_handle, const pt_part* part, const pt_hyper* hypers, int64_t num_groups,
    float* steps, double timeout_s, int32_t* done) {
    auto& group = *reinterpret_cast<Group*>(group_handle);
    auto& plan = *reinterpret_cast<Plan*>(plan_handle);
    *done = 0;
    if (group.broken != FINE) return BROKEN;
    const int64_t deadline_ns = deadline_after(timeout_s);
    uint64_t agreed = hash(num_groups, hypers, num_groups * sizeof(pt_hyper));
    agreed = hash(agreed, steps, plan.num_tensors * sizeof(float));
    Status status = begin(group, plan, *part, 0, agreed, deadline_ns);
    if (status != FINE) return status;
    Slice{group, plan, hypers, steps, group.rank}.run();
    status = meet(group, deadline_ns);
    if (status == LATE || (status == LOST && !recover(group, plan, hypers, steps, deadline_ns))) return status;
    for (int64_t i = 0; i < plan.num_tensors; ++i) steps[i] += plan.used[i];
    *done = 1;
    return status;
}
