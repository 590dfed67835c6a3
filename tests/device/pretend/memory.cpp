#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>

#include <pthread.h>
#include <sys/mman.h>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/pybind11.h>

namespace pretend {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;

// Threads of the process group free memory, so nothing waits while it holds this lock.
static std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;

// ------------------------------------------------------------------ one process

static bool touched_ = false, forked_ = false;

bool touched() { return touched_; }
bool forked() { return forked_; }

void check_alive() {
    TORCH_CHECK(!forked_, "Cannot re-initialize pretend in forked subprocess. Use the 'spawn' start method");
    if (!touched_) {
        touched_ = true;
        pthread_atfork(nullptr, nullptr, [] { forked_ = true; });
    }
}

// ------------------------------------------------------------------ allocations

struct Allocation {
    char *host, *device; // the same pages
    size_t num_bytes;
    DeviceIndex card;
};

static std::map<char*, Allocation*> allocations; // by device address
static size_t in_use[MOST_CARDS], most[MOST_CARDS];

static Allocation* allocation_of(const c10::Storage& storage) {
    return static_cast<Allocation*>(storage.data_ptr().get_context());
}

static void release(void* context) {
    auto allocation = static_cast<Allocation*>(context);
    Locked locked(lock);
    in_use[allocation->card] -= allocation->num_bytes;
    allocations.erase(allocation->device);
    munmap(allocation->host, allocation->num_bytes);
    munmap(allocation->device, allocation->num_bytes);
    delete allocation;
}

static Allocation* allocate(size_t num_bytes) {
    constexpr size_t page = 4096;
    num_bytes = (num_bytes + page - 1) / page * page;
    void* host = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, host != MAP_FAILED, "pretend out of memory: ", num_bytes, " bytes");
    void* device = mremap(host, 0, num_bytes, MREMAP_MAYMOVE); // a second mapping of the pages
    TORCH_CHECK(device != MAP_FAILED && mprotect(device, num_bytes, PROT_NONE) == 0, "pretend: no second mapping");
    memset(host, 0xff, num_bytes); // NaN: a read of memory that was never written is seen

    auto allocation = new Allocation{static_cast<char*>(host), static_cast<char*>(device), num_bytes, current_card()};
    Locked locked(lock);
    allocations[allocation->device] = allocation;
    in_use[allocation->card] += num_bytes;
    most[allocation->card] = std::max(most[allocation->card], in_use[allocation->card]);
    return allocation;
}

size_t bytes_in_use(DeviceIndex card) { return in_use[card]; }
size_t most_bytes(DeviceIndex card) { return most[card]; }
void forget_most_bytes(DeviceIndex card) { most[card] = in_use[card]; }

DeviceIndex card_of_address(void* address) {
    auto wanted = static_cast<char*>(address);
    Locked locked(lock);
    auto after = allocations.upper_bound(wanted);
    TORCH_CHECK(after != allocations.begin(), "not a pretend address");
    const Allocation& found = *std::prev(after)->second;
    TORCH_CHECK(wanted < found.device + found.num_bytes, "not a pretend address");
    return found.card;
}

struct Memory final : c10::DeviceAllocator {
    DataPtr allocate(size_t num_bytes) override {
        check_alive();
        Device device(DEVICE, current_card());
        if (num_bytes == 0) return {nullptr, nullptr, &nothing, device};
        auto allocation = pretend::allocate(num_bytes);
        return {allocation->device, allocation, &release, device};
    }
    static void nothing(void*) {}
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "pretend: copies are operators"); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex card) override {
        c10::CachingDeviceAllocator::DeviceStats statistics;
        statistics.allocated_bytes[0].current = static_cast<int64_t>(in_use[card]);
        statistics.allocated_bytes[0].peak = static_cast<int64_t>(most[card]);
        return statistics;
    }
    void resetAccumulatedStats(DeviceIndex) override {}
    void resetPeakStats(DeviceIndex card) override { forget_most_bytes(card); }
    std::pair<size_t, size_t> getMemoryInfo(DeviceIndex card) override {
        constexpr size_t all = size_t(8) << 30;
        return {all - in_use[card], all};
    }
};

static Memory the_memory;
c10::Allocator* memory() { return &the_memory; }
REGISTER_ALLOCATOR(DEVICE, &the_memory)

void grow(const c10::Storage& storage, size_t num_bytes) {
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory()->allocate(num_bytes);
    auto from = allocation_of(storage), to = static_cast<Allocation*>(fresh.get_context());
    if (from && to) memcpy(to->host, from->host, std::min(num_bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
}

// ------------------------------------------------------------------ pinned memory of the host

static std::map<char*, size_t> pinned;

struct PinnedMemory final : at::HostAllocator {
    static void release(void* address) {
        Locked locked(lock);
        pinned.erase(static_cast<char*>(address));
        free(address);
    }
    DataPtr allocate(size_t num_bytes) override {
        constexpr size_t line = 64;
        auto address = static_cast<char*>(aligned_alloc(line, (num_bytes + line) / line * line));
        Locked locked(lock);
        pinned[address] = std::max<size_t>(num_bytes, 1);
        return {address, address, &release, Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }
    bool record_event(void*, void*, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

static PinnedMemory the_pinned_memory;
c10::Allocator* pinned_memory() { return &the_pinned_memory; }
REGISTER_HOST_ALLOCATOR(DEVICE, &the_pinned_memory)

bool is_pinned(const void* address) {
    auto wanted = static_cast<char*>(const_cast<void*>(address));
    Locked locked(lock);
    auto after = pinned.upper_bound(wanted);
    if (after == pinned.begin()) return false;
    auto [start, num_bytes] = *std::prev(after);
    return wanted < start + num_bytes;
}

// ------------------------------------------------------------------ messages under way

using Landing = std::shared_ptr<std::function<void()>>;
static std::multimap<c10::StorageImpl*, Landing> under_way; // by storage that is read or written
static std::mutex under_way_lock;

void take_off(const std::vector<Tensor>& tensors, std::function<void()> land) {
    auto shared = std::make_shared<std::function<void()>>([land = std::move(land), tensors] { land(); }); // keeps them
    std::lock_guard<std::mutex> locked(under_way_lock);
    for (auto& tensor : tensors) under_way.emplace(tensor.storage().unsafeGetStorageImpl(), shared);
}

static std::vector<Landing> taken(c10::StorageImpl* storage) {
    std::vector<Landing> found;
    std::lock_guard<std::mutex> locked(under_way_lock);
    auto [begin, end] = storage ? under_way.equal_range(storage) : std::pair(under_way.begin(), under_way.end());
    for (auto each = begin; each != end; ++each) found.push_back(each->second);
    under_way.erase(begin, end);
    return found;
}

static void land(c10::StorageImpl* storage) { // null: all messages
    auto landings = taken(storage);
    if (landings.empty()) return;
    std::optional<pybind11::gil_scoped_release> released; // threads of gloo need the GIL to free a tensor
    if (PyGILState_Check()) released.emplace();
    for (auto& landing : landings) (*landing)();
    landings.clear();
}

static Tensor twin_of(const Tensor& tensor) {
    if (!tensor.is_privateuseone()) return tensor;
    check_alive();
    auto options = tensor.options().device(c10::kCPU);
    auto allocation = allocation_of(tensor.storage());
    if (!allocation || tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    auto start = allocation->host + tensor.storage_offset() * tensor.element_size();
    auto view = at::from_blob(start, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options, Device(c10::kCPU));
    view._set_conj(tensor.is_conj());
    view._set_neg(tensor.is_neg());
    return view;
}

Tensor on_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    land(tensor.storage().unsafeGetStorageImpl());
    return twin_of(tensor);
}

// ------------------------------------------------------------------ late copies

struct LateCopy {
    Tensor source, target;
    bool to_host;
};
static std::vector<LateCopy> late_copies;

static bool copies_are_late() {
    static const bool late = getenv("PRETEND_LATE") != nullptr;
    return late;
}

void copy_bytes(const Tensor& source, const Tensor& target, bool non_blocking) {
    finish_copies(non_blocking ? Seen::by_device : Seen::by_host);
    const bool up = source.is_cpu(), down = target.is_cpu();
    const bool is_late = non_blocking && up != down && (up ? source : target).is_pinned() && copies_are_late();
    if (!is_late) {
        on_host(target).copy_(on_host(source));
        return;
    }
    if (down) target.view(-1).view(at::kByte).fill_(0xff); // what a host reads that has not waited
    LateCopy late{down ? on_host(source).clone() : source, target, down};
    Locked locked(lock);
    late_copies.push_back(std::move(late));
}

// Copies are made under the lock: a thread that finds none left may read what another thread has copied, not what it
// is copying. No copy needs the GIL; freeing its tensors may, so that comes behind the lock.
void finish_copies(Seen seen) {
    const auto is_due = [seen](const LateCopy& each) { return !each.to_host || seen == Seen::by_host; };
    std::vector<LateCopy> due, later;
    {
        Locked locked(lock);
        if (late_copies.empty()) return;
        std::copy_if(late_copies.begin(), late_copies.end(), std::back_inserter(due), is_due);
    }
    for (auto& each : due) on_host(each.source), on_host(each.target); // messages land first
    due.clear();
    {
        Locked locked(lock);
        for (auto& each : late_copies) (is_due(each) ? due : later).push_back(each);
        late_copies.swap(later);
        for (auto& each : due) twin_of(each.target).copy_(twin_of(each.source));
    }
}

void synchronize() {
    land(nullptr);
    finish_copies(Seen::by_host);
}

} // namespace pretend
