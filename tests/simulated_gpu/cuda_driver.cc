#include "cuda_driver.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "cuda_runtime.h"

namespace simulated_gpu {
namespace {

struct Context {
  std::atomic<bool> is_active = false;
};

constexpr int kMostDevices = 64;
std::array<Context, kMostDevices> contexts;

thread_local std::vector<Context*> current;  // the last one is current

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
  if (context == nullptr) return kInvalidValue;
  current.push_back(static_cast<Context*>(context));
  return kSuccess;
}

int cuCtxPopCurrent_v2(CUcontext* context) {
  if (current.empty()) return kNoContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

int cuCtxSetCurrent(CUcontext context) {
  if (!current.empty()) current.pop_back();
  return context == nullptr ? kSuccess : cuCtxPushCurrent_v2(context);
}

int cuCtxGetDevice(CUdevice* device) {
  if (current.empty()) return kNoContext;
  *device = static_cast<int>(current.back() - contexts.data());
  return kSuccess;
}
}
