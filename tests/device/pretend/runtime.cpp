#include "device.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/extension.h>

namespace pretend {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// ------------------------------------------------------------------ cards

static thread_local DeviceIndex current = 0;

int num_cards() {
    static const int number = [] {
        auto given = getenv("PRETEND_DEVICES");
        return given ? std::stoi(given) : 2;
    }();
    return number;
}

DeviceIndex current_card() { return current; }
DeviceIndex card_of(Device device) { return device.index() < 0 ? current : device.index(); }
static std::atomic<bool> hidden{false};
static int cards_here() { return forked() || hidden ? 0 : num_cards(); }

static DeviceIndex exchange_card(DeviceIndex card) {
    TORCH_CHECK(card < num_cards(), "invalid device ordinal ", static_cast<int>(card));
    return std::exchange(current, card < 0 ? current : card);
}

// ------------------------------------------------------------------ random numbers: the CPU's draws

struct CardGenerator final : at::CPUGeneratorImpl {
    explicit CardGenerator(DeviceIndex card) {
        device_ = Device(DEVICE, card);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

at::Generator new_generator(DeviceIndex card) { return at::make_generator<CardGenerator>(card < 0 ? current : card); }

const at::Generator& default_generator(DeviceIndex card) {
    static const std::vector<at::Generator> all = [] {
        std::vector<at::Generator> made;
        for (int i = 0; i < num_cards(); i++) made.push_back(new_generator(static_cast<DeviceIndex>(i)));
        return made;
    }();
    return all.at(card < 0 ? current : card);
}

// ------------------------------------------------------------------ streams and events: work is done at once

struct Moment {
    std::chrono::steady_clock::time_point at;
    bool timed; // for times alone: looking whether it is over lands no late copy
};

static thread_local c10::StreamId current_streams[MOST_CARDS];
static std::atomic<c10::StreamId> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return DEVICE; }
    DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(cards_here()); }
    Device getDevice() const override { return Device(DEVICE, current); }
    Device exchangeDevice(Device device) const override { return Device(DEVICE, exchange_card(device.index())); }
    void setDevice(Device device) const override { exchange_card(device.index()); }
    void uncheckedSetDevice(Device device) const noexcept override { current = card_of(device); }

    Stream getStream(Device device) const noexcept override { return stream(device, current_streams[card_of(device)]); }
    Stream getDefaultStream(Device device) const override { return stream(device, 0); }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, next_stream++); }
    Stream getNewStream(Device device, int) const override { return stream(device, next_stream++); }
    Stream exchangeStream(Stream given) const noexcept override {
        return stream(given.device(), std::exchange(current_streams[given.device_index()], given.id()));
    }
    void* getStreamNativeHandle(const Stream given) const override { return reinterpret_cast<void*>(given.id()); }
    bool queryStream(const Stream&) const override { return finished(); }
    void synchronizeStream(const Stream&) const override { synchronize(); }
    void synchronizeDevice(DeviceIndex) const override { synchronize(); }

    void record(void** event, const Stream&, DeviceIndex, c10::EventFlag flag) const override {
        if (!*event) *event = new Moment;
        *moment(*event) = {std::chrono::steady_clock::now(), flag == c10::EventFlag::BACKEND_DEFAULT};
    }
    void block(void*, const Stream&) const override {}
    void destroyEvent(void* event, DeviceIndex) const noexcept override { delete moment(event); }
    bool queryEvent(void* event) const override { return moment(event)->timed || finished(); }
    void synchronizeEvent(void*) const override { synchronize(); }
    double elapsedTime(void* start, void* end, DeviceIndex) const override {
        return std::chrono::duration<double, std::milli>(moment(end)->at - moment(start)->at).count();
    }

  private:
    static Moment* moment(void* event) { return static_cast<Moment*>(event); }
    static bool finished() {
        finish_copies(Seen::by_host);
        return true;
    }
    static Stream stream(Device device, c10::StreamId id) {
        return Stream(Stream::UNSAFE, Device(DEVICE, card_of(device)), id);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ------------------------------------------------------------------ torch's questions to a device

struct Hooks final : at::PrivateUse1HooksInterface {
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return cards_here() > 0; }
    bool hasPrimaryContext(DeviceIndex) const override { return touched(); }
    DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(cards_here()); }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex card) const override { exchange_card(card); }
    DeviceIndex exchangeDevice(DeviceIndex card) const override { return exchange_card(card); }
    DeviceIndex maybeExchangeDevice(DeviceIndex card) const override {
        return card < num_cards() ? exchange_card(card) : current;
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    Device getDeviceFromPtr(void* address) const override { return Device(DEVICE, card_of_address(address)); }
    const at::Generator& getDefaultGenerator(DeviceIndex card) const override { return default_generator(card); }
    at::Generator getNewGenerator(DeviceIndex card) const override { return new_generator(card); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
        grow(storage, num_bytes);
    }
};
static const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks); // torch keeps it to the end
    return true;
}();

void define_group(pybind11::module& module); // group.cpp

} // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using namespace pretend;
    module.def("device_count", &cards_here);
    module.def("hide", [](bool yes) { hidden = yes; });
    module.def("current_device", [] { return static_cast<int>(current); });
    module.def("set_device", [](int card) { exchange_card(static_cast<DeviceIndex>(card)); });
    module.def("is_forked", &forked);
    module.def("is_touched", &touched);
    module.def("synchronize", &synchronize, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("memory_allocated", [](int card) { return bytes_in_use(static_cast<DeviceIndex>(card)); });
    module.def("max_memory_allocated", [](int card) { return most_bytes(static_cast<DeviceIndex>(card)); });
    module.def("reset_peak", [](int card) { forget_most_bytes(static_cast<DeviceIndex>(card)); });
    module.def("default_generator", [](int card) {
        auto& generator = default_generator(static_cast<DeviceIndex>(card));
        return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_Wrap(generator));
    });
    define_group(module);
}
