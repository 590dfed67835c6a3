#include "device.h"

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

namespace pretend {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Layout;
using c10::MemoryFormat;
using c10::ScalarType;

// ------------------------------------------------------------------ allocation

static DispatchKeySet keys() { return DispatchKeySet(DispatchKey::PrivateUse1); }

static Device checked(std::optional<Device> device, std::optional<bool> pin) {
    TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
    return Device(DEVICE, card_of(c10::device_or_default(device)));
}

static Tensor empty_(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool> pin, std::optional<MemoryFormat> format) {
    c10::DeviceGuard guard(checked(device, pin));
    return at::detail::empty_generic(size, memory(), keys(), c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided_(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                             std::optional<Layout>, std::optional<Device> device, std::optional<bool> pin) {
    c10::DeviceGuard guard(checked(device, pin));
    return at::detail::empty_strided_generic(size, stride, memory(), keys(), c10::dtype_or_default(dtype));
}

static const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<MemoryFormat> format) {
    auto impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    if (format && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    const size_t num_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size();
    if (num_bytes > tensor.storage().nbytes()) grow(tensor.storage(), num_bytes);
    return tensor;
}

// ------------------------------------------------------------------ views and copies

static Tensor as_strided_(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

static Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
    auto impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    impl->set_sizes_and_strides(size, stride);
    return tensor;
}

static Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
    const auto numel = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
    return set_storage(tensor, std::move(storage), 0, {numel}, {1});
}

static Tensor& set_to_tensor(Tensor& tensor, const Tensor& source) {
    return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
    copy_bytes(source, target, non_blocking);
    return target;
}

static Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
    if (target.sizes() != source.sizes()) target.resize_(source.sizes());
    return copy_from(source, target, false);
}

static at::Scalar item(const Tensor& tensor) {
    finish_copies(Seen::by_host);
    return on_host(tensor).item();
}

// ------------------------------------------------------------------ operators that torch asks of each device

static std::string two_devices(Device one, Device other) {
    return c10::str("Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
                    other, "!");
}

static void check_same(const Tensor& one, const Tensor& other) {
    if (one.defined() && other.defined())
        TORCH_CHECK(one.device() == other.device(), two_devices(one.device(), other.device()));
}

static Tensor convolve(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                       int64_t groups) {
    check_same(x, weight);
    check_same(x, bias.value_or(Tensor()));
    std::optional<Tensor> host_bias;
    if (bias && bias->defined()) host_bias = on_host(*bias);
    return at::convolution(on_host(x), on_host(weight), host_bias, stride, padding, dilation, transposed,
                           output_padding, groups)
        .to(x.device());
}

static std::tuple<Tensor, Tensor, Tensor>
convolve_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                  int64_t groups, std::array<bool, 3> mask) {
    check_same(gradient, x);
    check_same(gradient, weight);
    const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0); // of the bias
    auto [to_x, to_weight, to_bias] =
        at::convolution_backward(on_host(gradient), on_host(x), on_host(weight), IntArrayRef{channels}, stride, padding,
                                 dilation, transposed, output_padding, groups, mask);
    auto up = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(x.device()) : tensor; };
    return {up(to_x), up(to_weight), up(to_bias)};
}

static std::tuple<Tensor, Tensor> drop(const Tensor& x, double p, std::optional<bool> train) {
    const bool drops = train.value_or(true);
    auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(drops ? 1 - p : 1.0);
    return {x * mask * (drops && p < 1 ? 1 / (1 - p) : 1.0), mask};
}

// ------------------------------------------------------------------ the fallback

static bool takes_host_tensors(const std::string& name) { // as on CUDA: indices may be on the CPU
    static const std::array<std::string, 5> prefixes{"aten::index.", "aten::index_put", "aten::_index_put_impl_",
                                                     "aten::_foreach_copy", "aten::_unsafe_index.Tensor"};
    for (auto& prefix : prefixes)
        if (name.rfind(prefix, 0) == 0) return true;
    return false;
}

// One call of an operator: its tensors become CPU tensors over the same bytes, and its results go to the device.
struct Call {
    const c10::OperatorHandle& op;
    torch::jit::Stack& stack;
    const std::string name = toString(op.schema().operator_name());
    std::optional<Device> device;
    std::vector<std::pair<Tensor, Tensor>> twins; // on the device, on the host
    std::optional<at::Generator> ours, theirs;

    void run() {
        const auto& arguments = op.schema().arguments();
        const size_t first = stack.size() - arguments.size();
        for (size_t i = 0; i < arguments.size(); i++) down(stack[first + i], arguments[i].name());
        if (!device) device = Device(DEVICE, current_card());
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
        if (ours) ours->set_state(theirs->get_state());
        for (auto& [tensor, twin] : twins) follow_shape(tensor, twin);
        for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); i++) up(stack[i]);
    }

  private:
    void down(IValue& value, const std::string& argument) {
        if (value.isTensor()) {
            value = down(value.toTensor());
        } else if (value.isTensorList()) { // each list may be on a device of its own
            const auto before = std::exchange(device, std::nullopt);
            c10::List<Tensor> out;
            for (const Tensor& tensor : value.toTensorVector()) out.push_back(down(tensor));
            if (!device) device = before;
            value = out;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> out;
            for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
                out.push_back(tensor ? std::optional(down(*tensor)) : tensor);
            value = out;
        } else if (value.isDevice()) {
            device = value.toDevice();
            value = Device(c10::kCPU);
        } else if (value.isGenerator() || (value.isNone() && argument == "generator")) {
            value = down(value.isGenerator() ? std::optional(value.toGenerator()) : std::nullopt);
        }
    }

    Tensor down(const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_privateuseone()) {
            const bool mixes = tensor.dim() == 0 || takes_host_tensors(name);
            const Device mine = device.value_or(Device(DEVICE, current_card()));
            TORCH_CHECK(mixes, two_devices(mine, tensor.device()), " (", name, ")");
            return tensor;
        }
        const Device mine = device.value_or(tensor.device());
        TORCH_CHECK(mine == tensor.device(), two_devices(mine, tensor.device()), " (", name, ")");
        device = mine;
        return twins.emplace_back(tensor, on_host(tensor)).second;
    }

    at::Generator down(std::optional<at::Generator> given) { // the device's draws are the CPU's from the same state
        ours = given ? *given : default_generator(device ? card_of(*device) : current_card());
        TORCH_CHECK(ours->device().is_privateuseone(), "Expected a 'pretend' device type for generator but found '",
                    ours->device().type(), "'");
        theirs = at::detail::createCPUGenerator();
        theirs->set_state(ours->get_state());
        return *theirs;
    }

    static void follow_shape(const Tensor& tensor, const Tensor& twin) { // an out= that the operator has resized
        if (twin.sizes() == tensor.sizes()) return;
        if (tensor.numel() == 0)
            copy_from_and_resize(twin, tensor);
        else
            tensor.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides());
    }

    void up(IValue& value) {
        if (value.isTensor()) {
            value = up(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<Tensor> out;
            for (const Tensor& tensor : value.toTensorVector()) out.push_back(up(tensor));
            value = out;
        }
    }

    Tensor up(const Tensor& result) {
        if (!result.defined()) return result;
        for (auto& [tensor, twin] : twins)
            if (twin.is_same(result)) return tensor;
        return result.to(*device);
    }
};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    finish_copies(Seen::by_device);
    Call{op, *stack}.run();
}

} // namespace pretend

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretend::fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    using namespace pretend;
    using at::Tensor;
    m.impl("empty.memory_format", empty_);
    m.impl("empty_strided", empty_strided_);
    m.impl("resize_", resize_);
    m.impl("as_strided", as_strided_);
    m.impl("view", [](const Tensor& t, IntArrayRef size) { return at::native::view(t, size); });
    m.impl("_reshape_alias", [](const Tensor& t, IntArrayRef size, IntArrayRef stride) {
        return at::native::_reshape_alias(t, size, stride);
    });
    m.impl("unfold", [](const Tensor& t, int64_t dim, int64_t size, int64_t step) {
        return at::native::unfold(t, dim, size, step);
    });
    m.impl("view_as_real", [](const Tensor& t) { return at::native::view_as_real(t); });
    m.impl("view_as_complex", [](const Tensor& t) { return at::native::view_as_complex(t); });
    m.impl("set_.source_Tensor", set_to_tensor);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("record_stream", [](Tensor&, c10::Stream) {});
    m.impl("native_dropout", drop);
    for (auto name : {"native_layer_norm", "native_group_norm", "mse_loss", "smooth_l1_loss"}) // not decomposed
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
    m.impl("convolution_overrideable", convolve);
    m.impl("convolution_backward_overrideable", convolve_backward);
}

TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    using namespace at::autocast;
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv_transpose2d, input, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(nll_loss, fp32)
    KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
    KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}
