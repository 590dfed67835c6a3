// A pretend accelerator for torch: a device whose memory the host cannot read. The CPU runs its kernels.
//
//     device address ───┐  PROT_NONE: reading data_ptr() is a SIGSEGV, as on a card
//                       ├─ the same pages
//     host address ─────┘  readable: `on_host(tensor)` is a CPU tensor over them, for the device's own kernels
//
// memory.cpp     allocations, pinned memory, copies that land late, messages under way
// operators.cpp  allocation, views and copies; the fallback that runs all other operators on the CPU
// runtime.cpp    cards, streams, events, generators, and the Python module
// group.cpp      "pccl", the process group: to this device as NCCL to CUDA
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace pretend {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int MOST_CARDS = 16;

// ---- cards (runtime.cpp)
int num_cards(); // $PRETEND_DEVICES, or 2
c10::DeviceIndex current_card();
c10::DeviceIndex card_of(c10::Device device); // the current one if the device names none
const at::Generator& default_generator(c10::DeviceIndex card);
at::Generator new_generator(c10::DeviceIndex card);

// ---- memory (memory.cpp)
c10::Allocator* memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* address);
c10::DeviceIndex card_of_address(void* address);
size_t bytes_in_use(c10::DeviceIndex card);
size_t most_bytes(c10::DeviceIndex card);
void forget_most_bytes(c10::DeviceIndex card);
void grow(const c10::Storage& storage, size_t num_bytes);

bool touched();    // this process has used the device
bool forked();     // a parent had, before this process was forked: nothing works here, as on CUDA
void check_alive(); // an error if so

at::Tensor on_host(const at::Tensor& tensor); // once the messages that touch it have landed

// ---- late copies (memory.cpp). With $PRETEND_LATE a non-blocking copy is made as late as a stream may make it.
enum class Seen { by_device, by_host }; // kernels see earlier uploads; the host sees downloads once it has waited
void copy_bytes(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
void finish_copies(Seen seen);
void synchronize(); // copies and messages

// ---- messages under way (memory.cpp): whoever touches these tensors first waits for `land`
void take_off(const std::vector<at::Tensor>& tensors, std::function<void()> land);

} // namespace pretend
