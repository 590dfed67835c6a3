// "pccl": to the pretend device as NCCL to CUDA. Gloo moves the bytes behind the tensors. As with NCCL, `wait()` does
// not hold the host: the first use of a tensor that is under way does. With `strict`, a message outside of a batch is
// refused: NCCL may wait there until the other side comes.
#include "device.h"

#include <atomic>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace pretend {

using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPointer = c10::intrusive_ptr<Work>;

// Some works of gloo, which can be waited for once only.
struct Flight final : Work {
    Flight(std::vector<WorkPointer> works, Tensors result, std::function<void()> then)
        : works_(std::move(works)), result_(std::move(result)), then_(std::move(then)) {}

    bool isCompleted() override {
        std::lock_guard<std::mutex> locked(lock_);
        for (auto& work : works_)
            if (!work->isCompleted()) return false;
        return true;
    }
    bool wait(std::chrono::milliseconds) override { return true; }
    void synchronize() override {}
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        auto type = c10::ListType::create(c10::TensorType::get());
        auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{});
        land();
        future->markCompleted(c10::IValue(result_));
        return future;
    }
    void land() {
        std::lock_guard<std::mutex> locked(lock_);
        for (auto& work : works_) work->wait(kNoTimeout);
        works_.clear();
        if (then_) std::exchange(then_, nullptr)();
    }

  private:
    std::vector<WorkPointer> works_;
    Tensors result_;
    std::function<void()> then_; // after the works
    std::mutex lock_;
};

static Tensors flat(const Lists& lists, const Tensors& more = {}) {
    Tensors all = more;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
}

static Tensor checked(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_privateuseone(), "pccl: Tensors must be on the pretend device, got ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "pccl: Tensors must be contiguous");
    finish_copies(Seen::by_device);
    return on_host(tensor);
}

static Tensors checked(const Tensors& tensors) {
    Tensors out;
    for (auto& tensor : tensors) out.push_back(checked(tensor));
    return out;
}

static Lists checked(const Lists& lists) {
    Lists out;
    for (auto& list : lists) out.push_back(checked(list));
    return out;
}

struct Pccl final : Backend {
    Pccl(c10::intrusive_ptr<Backend> gloo, bool strict)
        : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), strict_(strict) {}

    const std::string getBackendName() const override { return "pccl"; }
    bool supportsCoalescing() const override { return true; }
    void startCoalescing() override {
        open_ = true;
        batch_.clear();
    }
    WorkPointer endCoalescing() override {
        open_ = false;
        return c10::make_intrusive<Flight>(std::exchange(batch_, {}), Tensors{}, nullptr);
    }

    // ---- sums
    WorkPointer allreduce(Tensors& tensors, const AllreduceOptions& options) override {
        auto host = checked(tensors);
        auto changed = options;
        changed.reduceOp = as_sum(options.reduceOp, host);
        return fly({gloo_->allreduce(host, changed)}, tensors, tensors);
    }
    WorkPointer allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
        std::vector<WorkPointer> works;
        for (auto& each : checked(tensors)) {
            Tensors host{each};
            AllreduceOptions changed = options;
            changed.reduceOp = as_sum(options.reduceOp, host);
            works.push_back(gloo_->allreduce(host, changed));
        }
        return fly(works, tensors, tensors);
    }
    WorkPointer reduce(Tensors& tensors, const ReduceOptions& options) override {
        auto host = checked(tensors);
        auto changed = options;
        changed.reduceOp = as_sum(options.reduceOp, host);
        return fly({gloo_->reduce(host, changed)}, tensors, tensors);
    }
    WorkPointer reduce_scatter(Tensors& out, Lists& in, const ReduceScatterOptions& options) override {
        return reduce_parts(at::stack(checked(in[0])).contiguous(), out[0], options, flat(in, out));
    }
    WorkPointer _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& options) override {
        return reduce_parts(checked(in).clone().view({getSize(), -1}), out, options, {out, in});
    }

    // ---- copies
    WorkPointer broadcast(Tensors& tensors, const BroadcastOptions& options) override {
        auto host = checked(tensors);
        return fly({gloo_->broadcast(host, options)}, tensors, tensors);
    }
    WorkPointer allgather(Lists& out, Tensors& in, const AllgatherOptions& options) override {
        auto host_out = checked(out);
        auto host_in = checked(in);
        return fly({gloo_->allgather(host_out, host_in, options)}, flat(out, in), flat(out));
    }
    WorkPointer _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& options) override {
        auto host_out = checked(out), host_in = checked(in);
        return fly({gloo_->_allgather_base(host_out, host_in, options)}, {out, in}, {out});
    }
    WorkPointer allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& options) override {
        auto host_out = checked(out), host_in = checked(in);
        return fly({gloo_->allgather_into_tensor_coalesced(host_out, host_in, options)}, flat({out, in}), out);
    }
    WorkPointer gather(Lists& out, Tensors& in, const GatherOptions& options) override {
        auto host_out = checked(out);
        auto host_in = checked(in);
        return fly({gloo_->gather(host_out, host_in, options)}, flat(out, in), flat(out));
    }
    WorkPointer scatter(Tensors& out, Lists& in, const ScatterOptions& options) override {
        auto host_out = checked(out);
        auto host_in = checked(in);
        return fly({gloo_->scatter(host_out, host_in, options)}, flat(in, out), out);
    }
    WorkPointer alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                              const AllToAllOptions& options) override {
        auto host_out = checked(out), host_in = checked(in);
        return fly({gloo_->alltoall_base(host_out, host_in, out_sizes, in_sizes, options)}, {out, in}, {out});
    }

    // ---- messages
    WorkPointer send(Tensors& tensors, int to, int tag) override {
        check_batched();
        Tensors host{checked(tensors[0]).clone()}; // as on a stream, later kernels may write to the tensor
        return fly({gloo_->send(host, to, tag)}, host, host);
    }
    WorkPointer recv(Tensors& tensors, int from, int tag) override {
        check_batched();
        auto host = checked(tensors);
        return fly({gloo_->recv(host, from, tag)}, tensors, tensors);
    }
    WorkPointer recvAnysource(Tensors&, int) override {
        TORCH_CHECK(false, "Backend pccl does not support recvAnysource");
    }
    WorkPointer barrier(const BarrierOptions&) override { return gloo_->barrier({}); }

  private:
    WorkPointer fly(std::vector<WorkPointer> works, const Tensors& touched, Tensors result,
                    std::function<void()> then = nullptr) {
        auto flight = c10::make_intrusive<Flight>(std::move(works), std::move(result), std::move(then));
        take_off(touched, [flight] { flight->land(); });
        if (open_) batch_.push_back(flight);
        return flight;
    }

    ReduceOp as_sum(const ReduceOp& op, Tensors& host) { // gloo has no AVG
        const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
        TORCH_CHECK(!bitwise, "Cannot use bitwise ReduceOp with pccl");
        if (op != ReduceOp::AVG) return op;
        for (auto& tensor : host) tensor.div_(getSize());
        return ReduceOp::SUM;
    }

    WorkPointer reduce_parts(Tensor parts, Tensor out, const ReduceScatterOptions& options, const Tensors& touched) {
        Tensors host{std::move(parts)}; // a row for each rank
        AllreduceOptions sum;
        sum.reduceOp = as_sum(options.reduceOp, host);
        auto target = checked(out);
        auto take_row = [host, target, rank = getRank()] { target.view(-1).copy_(host[0][rank].view(-1)); };
        return fly({gloo_->allreduce(host, sum)}, touched, {out}, take_row);
    }

    void check_batched() const { TORCH_CHECK(open_ || !strict_, "pccl (strict): a message outside of a batch"); }

    c10::intrusive_ptr<Backend> gloo_;
    const bool strict_;
    bool open_ = false; // between startCoalescing and endCoalescing
    std::vector<WorkPointer> batch_;
};

void define_group(pybind11::module& module) {
    pybind11::module::import("torch.distributed"); // binds Backend
    module.def("pccl", [](const c10::intrusive_ptr<Backend>& gloo, bool strict) -> c10::intrusive_ptr<Backend> {
        return c10::make_intrusive<Pccl>(gloo, strict);
    });
}

} // namespace pretend
