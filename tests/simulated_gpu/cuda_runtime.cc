#include "cuda_runtime.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cuda_driver.h"
#include "device_memory.h"
#include "handles.h"
#include "stream.h"

namespace simulated_gpu {
namespace {

using std::size_t;

enum CopyKind { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kByAddress };

struct Error {
  int code;
  const char* name;
  const char* words;
};

constexpr std::array kErrors{
    Error{kSuccess, "cudaSuccess", "no error"},
    Error{kInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    Error{kMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    Error{kNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    Error{kInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    Error{kInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    Error{kNotReady, "cudaErrorNotReady", "device not ready"},
    Error{kNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    Error{kIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    Error{kCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    Error{kNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

thread_local int chosen_device = 0;  // is current while the thread has no context
// How captures go with what other threads do.
constexpr int kGlobal = 0, kRelaxed = 2;
std::atomic<int> global_captures = 0;
thread_local int mode_of_thread = kGlobal;

thread_local int last_error = kSuccess;

int fail(int error) { return last_error = error; }

int gpus() {
  int count = 0;
  cuDeviceGetCount(&count);
  return count;
}

int current_device() {
  int device = 0;
  return cuCtxGetDevice(&device) == kSuccess ? device : chosen_device;
}

// From here on the thread has a context of the device, which it makes where there is none.
void make_context_current(int device) {
  CUcontext context = nullptr;
  cuDevicePrimaryCtxRetain(&context, device);
  cuCtxSetCurrent(context);
}

// Most functions of CUDA begin with this, even those that only need an event.
void need_context() {
  int device = 0;
  if (cuCtxGetDevice(&device) != kSuccess) make_context_current(chosen_device);
}

const Error* find_error(int code) {
  const auto* const found =
      std::find_if(kErrors.begin(), kErrors.end(), [&](const Error& one) { return one.code == code; });
  return found == kErrors.end() ? nullptr : found;
}

// Calls act(stream), or returns the error of a handle that is none.
template <class Act>
int with_stream(cudaStream_t handle, const Act& act) {
  if (in_stream()) return fail(kNotPermitted);
  if (gpus() == 0) return fail(kNoDevice);
  need_context();
  const auto stream = Handles::get().stream(handle, current_device());
  return stream ? act(*stream) : fail(kInvalidResourceHandle);
}

template <class Act>
int with_event(cudaEvent_t handle, const Act& act) {
  if (in_stream()) return fail(kNotPermitted);
  need_context();
  const auto event = Handles::get().event(handle);
  return event ? act(*event) : fail(kInvalidResourceHandle);
}

// The address at which a kernel accesses the bytes; null where they are on a device and not in one allocation.
void* readable(const void* address, size_t bytes) {
  auto& memory = DeviceMemory::get();
  if (!memory.contains(address)) return const_cast<void*>(address);
  return memory.device_of(address, bytes) < 0 ? nullptr : memory.for_kernels(address);
}

bool fits(int kind, bool from_device, bool to_device) {
  switch (kind) {
    case kHostToHost: return !from_device && !to_device;
    case kHostToDevice: return !from_device && to_device;
    case kDeviceToHost: return from_device && !to_device;
    case kDeviceToDevice: return from_device && to_device;
    default: return kind == kByAddress;
  }
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" {

int cudaRuntimeGetVersion(int* version) {
  constexpr int kVersion = 13000;
  *version = kVersion;
  return kSuccess;
}

int cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

int cudaGetDeviceProperties(void*, int) { return fail(kNotSupported); }

int cudaGetDeviceCount(int* count) {
  if (count == nullptr) return fail(kInvalidValue);
  *count = gpus();
  return *count == 0 ? fail(kNoDevice) : kSuccess;
}

int cudaGetDevice(int* device) {
  if (device == nullptr) return fail(kInvalidValue);
  *device = current_device();
  return gpus() == 0 ? fail(kNoDevice) : kSuccess;
}

int cudaSetDevice(int device) {
  if (gpus() == 0) return fail(kNoDevice);
  if (device < 0 || device >= gpus()) return fail(kInvalidDevice);
  chosen_device = device;
  make_context_current(device);
  return kSuccess;
}

int cudaDeviceGetPCIBusId(char* name, int length, int device) {
  if (device < 0 || device >= gpus()) return fail(kInvalidDevice);
  constexpr int kLength = sizeof("0000:01:00.0");
  if (name == nullptr || length < kLength) return fail(kInvalidValue);
  std::snprintf(name, static_cast<size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device + 1) & 0xff);
  return kSuccess;
}

int cudaDeviceSynchronize() {
  if (in_stream()) return fail(kNotPermitted);
  if (gpus() == 0) return fail(kNoDevice);
  need_context();
  Handles::get().synchronize(current_device());
  return kSuccess;
}

int cudaMalloc(void** memory, size_t bytes) {
  if (gpus() == 0) return fail(kNoDevice);
  if (memory == nullptr) return fail(kInvalidValue);
  need_context();
  *memory = simulated_gpu_allocate(bytes);
  return *memory == nullptr && bytes > 0 ? fail(kMemoryAllocation) : kSuccess;
}

int cudaFree(void* memory) {
  if (memory == nullptr) return kSuccess;
  if (in_stream()) return fail(kNotPermitted);
  need_context();
  const int device = DeviceMemory::get().device_of(memory, 0);
  if (device < 0) return fail(kInvalidValue);
  Handles::get().synchronize(device);
  return DeviceMemory::get().give_back(memory) ? kSuccess : fail(kInvalidValue);
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  const int error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error == kSuccess ? cudaStreamSynchronize(nullptr) : error;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, cudaStream_t handle) {
  return with_stream(handle, [&](Stream& stream) {
    if (bytes == 0) return kSuccess;
    const bool from_device = DeviceMemory::get().contains(from), to_device = DeviceMemory::get().contains(to);
    const void* const input = readable(from, bytes);
    void* const output = readable(to, bytes);
    if (input == nullptr || output == nullptr || !fits(kind, from_device, to_device)) return fail(kInvalidValue);
    if (from_device && !to_device) ++Handles::get().copies_to_host;
    if (!from_device && to_device) ++Handles::get().copies_from_host;
    stream.push([=] { std::memmove(output, input, bytes); });
    return kSuccess;
  });
}

int cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t handle) {
  return with_stream(handle, [&](Stream& stream) {
    if (bytes == 0) return kSuccess;
    if (simulated_gpu_device(memory, bytes) < 0) return fail(kInvalidValue);
    stream.push([=, output = simulated_gpu_memory(memory)] { std::memset(output, value, bytes); });
    return kSuccess;
  });
}

int cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

int cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  if (gpus() == 0) return fail(kNoDevice);
  if (stream == nullptr || flags > 1) return fail(kInvalidValue);
  need_context();
  *stream = Handles::get().make_stream(current_device());
  return kSuccess;
}

int cudaStreamDestroy(cudaStream_t stream) {
  need_context();
  return Handles::get().destroy_stream(stream) ? kSuccess : fail(kInvalidResourceHandle);
}

int cudaStreamSynchronize(cudaStream_t handle) {
  return with_stream(handle, [](Stream& stream) {
    stream.synchronize();
    return kSuccess;
  });
}

int cudaStreamQuery(cudaStream_t handle) {
  return with_stream(handle, [](Stream& stream) { return stream.is_idle() ? kSuccess : kNotReady; });
}

int cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  if (flags > 1) return fail(kInvalidValue);
  return with_stream(handle, [&](Stream& stream) {
    return with_event(event, [&](Event& found) {
      found.make_wait(stream);
      return kSuccess;
    });
  });
}

int cudaStreamBeginCapture(cudaStream_t handle, int mode) {
  return with_stream(handle, [&](Stream& stream) {
    if (mode < kGlobal || mode > kRelaxed || stream.capture_mode() >= 0) return fail(kIllegalState);
    stream.capture(mode);
    if (mode == kGlobal) ++global_captures;
    return kSuccess;
  });
}

int cudaStreamEndCapture(cudaStream_t handle, void** graph) {
  return with_stream(handle, [&](Stream& stream) {
    const int mode = stream.capture_mode();
    if (mode < 0) return fail(kIllegalState);
    stream.capture(-1);
    if (mode == kGlobal) --global_captures;
    *graph = nullptr;
    return kSuccess;
  });
}

int cudaStreamIsCapturing(cudaStream_t handle, int* status) {
  if (status == nullptr) return fail(kInvalidValue);
  return with_stream(handle, [&](Stream& stream) {
    *status = stream.capture_mode() >= 0 ? 1 : 0;
    return kSuccess;
  });
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, mode_of_thread);
  return kSuccess;
}

int cudaStreamGetDevice(cudaStream_t handle, int* device) {
  if (device == nullptr) return fail(kInvalidValue);
  return with_stream(handle, [&](Stream& stream) {
    *device = stream.device();
    return kSuccess;
  });
}

int cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  if (function == nullptr) return fail(kInvalidValue);
  return with_stream(handle, [&](Stream& stream) {
    stream.push([=] { function(data); });
    return kSuccess;
  });
}

int cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (gpus() == 0) return fail(kNoDevice);
  if (event == nullptr || flags > 7) return fail(kInvalidValue);
  need_context();
  *event = Handles::get().make_event(current_device());
  return kSuccess;
}

int cudaEventDestroy(cudaEvent_t event) {
  need_context();
  return Handles::get().destroy_event(event) ? kSuccess : fail(kInvalidResourceHandle);
}

int cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return with_stream(handle, [&](Stream& stream) {
    return with_event(event, [&](Event& found) {
      if (found.device() != stream.device()) return fail(kInvalidResourceHandle);
      found.record(stream);
      return kSuccess;
    });
  });
}

int cudaEventQuery(cudaEvent_t event) {
  if (global_captures > 0 && mode_of_thread == kGlobal) return fail(kCaptureUnsupported);
  return with_event(event, [](Event& found) { return found.has_come() ? kSuccess : kNotReady; });
}

int cudaEventSynchronize(cudaEvent_t event) {
  return with_event(event, [](Event& found) {
    found.synchronize();
    return kSuccess;
  });
}

int cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return with_event(begin, [&](Event& first) {
    return with_event(end, [&](Event& last) {
      if (!first.has_come() || !last.has_come()) return fail(kNotReady);
      *milliseconds = std::chrono::duration<float, std::milli>(last.when() - first.when()).count();
      return kSuccess;
    });
  });
}

const char* cudaGetErrorString(int error) {
  const auto* const found = find_error(error);
  return found == nullptr ? "unrecognized error code" : found->words;
}

const char* cudaGetErrorName(int error) {
  const auto* const found = find_error(error);
  return found == nullptr ? "unrecognized error code" : found->name;
}

int cudaGetLastError() { return std::exchange(last_error, kSuccess); }

void* simulated_gpu_memory(const void* device_address) {
  auto& memory = DeviceMemory::get();
  return memory.contains(device_address) ? memory.for_kernels(device_address) : nullptr;
}

int simulated_gpu_device(const void* device_address, size_t bytes) {
  return DeviceMemory::get().device_of(device_address, bytes);
}

void* simulated_gpu_allocate(size_t bytes) {
  return bytes == 0 ? nullptr : DeviceMemory::get().allocate(bytes, current_device());
}

void simulated_gpu_free(void* memory) { DeviceMemory::get().give_back(memory); }

std::int64_t simulated_gpu_copies_to_host() { return Handles::get().copies_to_host; }
std::int64_t simulated_gpu_copies_from_host() { return Handles::get().copies_from_host; }

void simulated_gpu_delay(int microseconds) { delay_microseconds() = microseconds; }
}
