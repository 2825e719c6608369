#include "cuda_driver.h"

#include <array>
#include <atomic>
#include <cstdlib>

#include "cuda_runtime.h"

namespace simulated_gpu {
namespace {

struct Context {
  std::atomic<bool> is_active = false;
};

constexpr int kMostDevices = 64;
std::array<Context, kMostDevices> contexts;

// A thread's contexts, of which the last one is current. It has no destructor: objects that end after the thread's own
// variables still push and pop.
struct ContextsOfThread {
  std::array<Context*, 64> stack;
  std::size_t size;
};
thread_local ContextsOfThread contexts_here;

int devices() {
  static const int count = [] {
    const char* const given = std::getenv("LOCKSTEP_SIMULATED_GPUS");
    return given == nullptr ? 0 : std::atoi(given);
  }();
  return count;
}

bool is_device(int device) { return device >= 0 && device < devices() && device < kMostDevices; }

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" {

int cuInit(unsigned flags) { return flags != 0 ? kInvalidValue : devices() == 0 ? kNoDevice : kSuccess; }

int cuDeviceGetCount(int* count) {
  *count = devices();
  return kSuccess;
}

int cuDeviceGet(CUdevice* device, int number) {
  if (!is_device(number)) return kInvalidDevice;
  *device = number;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!is_device(device)) return kInvalidDevice;
  auto& found = contexts.at(static_cast<std::size_t>(device));
  found.is_active = true;
  *context = &found;
  return kSuccess;
}

int cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!is_device(device)) return kInvalidDevice;
  *flags = 0;
  *active = contexts.at(static_cast<std::size_t>(device)).is_active ? 1 : 0;
  return kSuccess;
}

int cuCtxPushCurrent_v2(CUcontext context) {
  auto& [stack, size] = contexts_here;
  if (context == nullptr || size == stack.size()) return kInvalidValue;
  stack[size++] = static_cast<Context*>(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(CUcontext* context) {
  auto& [stack, size] = contexts_here;
  if (size == 0) return kNoContext;
  *context = stack[--size];
  return kSuccess;
}

int cuCtxSetCurrent(CUcontext context) {
  CUcontext before = nullptr;
  cuCtxPopCurrent_v2(&before);
  return context == nullptr ? kSuccess : cuCtxPushCurrent_v2(context);
}

int cuCtxGetDevice(CUdevice* device) {
  const auto& [stack, size] = contexts_here;
  if (size == 0) return kNoContext;
  *device = static_cast<int>(stack[size - 1] - contexts.data());
  return kSuccess;
}
}
