#include "cuda_runtime.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device_memory.h"
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
    Error{kNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

thread_local int current_device = 0;
thread_local int last_error = kSuccess;

int fail(int error) { return last_error = error; }

int gpus() {
  static const int count = [] {
    const char* const given = std::getenv("LOCKSTEP_SIMULATED_GPUS");
    return given == nullptr ? 0 : std::atoi(given);
  }();
  return count;
}

const Error* find_error(int code) {
  const auto* const found =
      std::find_if(kErrors.begin(), kErrors.end(), [&](const Error& one) { return one.code == code; });
  return found == kErrors.end() ? nullptr : found;
}

// All streams and events, by their handles. A handle is the object's address.
class Runtime {
 public:
  static Runtime& get() {
    static auto* const runtime = new Runtime;  // threads of streams may outlive all else
    return *runtime;
  }

  cudaStream_t make_stream() {
    auto stream = std::make_shared<Stream>(current_device);
    const std::lock_guard lock(mutex_);
    return streams_.emplace(stream.get(), stream).first->first;
  }

  cudaEvent_t make_event() {
    auto event = std::make_shared<Event>(current_device);
    const std::lock_guard lock(mutex_);
    return events_.emplace(event.get(), event).first->first;
  }

  // Returns null for a handle that is none. Null is the handle of the current device's default stream.
  std::shared_ptr<Stream> stream(cudaStream_t handle) {
    const std::lock_guard lock(mutex_);
    if (handle == nullptr) return default_stream(current_device);
    const auto found = streams_.find(handle);
    return found == streams_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Event> event(cudaEvent_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    return found == events_.end() ? nullptr : found->second;
  }

  bool destroy_stream(cudaStream_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return false;
    found->second->close();
    streams_.erase(found);
    return true;
  }

  bool destroy_event(cudaEvent_t handle) {
    const std::lock_guard lock(mutex_);
    return events_.erase(handle) > 0;
  }

  void synchronize(int device) {
    std::vector<std::shared_ptr<Stream>> all;
    {
      const std::lock_guard lock(mutex_);
      all.push_back(default_stream(device));
      for (const auto& [handle, stream] : streams_) {
        if (stream->device() == device) all.push_back(stream);
      }
    }
    for (const auto& stream : all) stream->synchronize();
  }

  std::atomic<std::int64_t> copies_to_host = 0, copies_from_host = 0;

 private:
  std::shared_ptr<Stream> default_stream(int device) {
    auto& stream = defaults_[device];
    if (!stream) stream = std::make_shared<Stream>(device);
    return stream;
  }

  std::mutex mutex_;  // protects the following
  std::map<int, std::shared_ptr<Stream>> defaults_;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams_;
  std::map<cudaEvent_t, std::shared_ptr<Event>> events_;
};

// Calls act(stream), or returns the error of a handle that is none.
template <class Act>
int with_stream(cudaStream_t handle, const Act& act) {
  if (in_stream()) return fail(kNotPermitted);
  if (gpus() == 0) return fail(kNoDevice);
  const auto stream = Runtime::get().stream(handle);
  return stream ? act(*stream) : fail(kInvalidResourceHandle);
}

template <class Act>
int with_event(cudaEvent_t handle, const Act& act) {
  if (in_stream()) return fail(kNotPermitted);
  const auto event = Runtime::get().event(handle);
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
  *device = current_device;
  return gpus() == 0 ? fail(kNoDevice) : kSuccess;
}

int cudaSetDevice(int device) {
  if (gpus() == 0) return fail(kNoDevice);
  if (device < 0 || device >= gpus()) return fail(kInvalidDevice);
  current_device = device;
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
  Runtime::get().synchronize(current_device);
  return kSuccess;
}

int cudaMalloc(void** memory, size_t bytes) {
  if (gpus() == 0) return fail(kNoDevice);
  if (memory == nullptr) return fail(kInvalidValue);
  *memory = simulated_gpu_allocate(bytes);
  return *memory == nullptr && bytes > 0 ? fail(kMemoryAllocation) : kSuccess;
}

int cudaFree(void* memory) {
  if (memory == nullptr) return kSuccess;
  if (in_stream()) return fail(kNotPermitted);
  const int device = DeviceMemory::get().device_of(memory, 0);
  if (device < 0) return fail(kInvalidValue);
  Runtime::get().synchronize(device);
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
    if (from_device && !to_device) ++Runtime::get().copies_to_host;
    if (!from_device && to_device) ++Runtime::get().copies_from_host;
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
  *stream = Runtime::get().make_stream();
  return kSuccess;
}

int cudaStreamDestroy(cudaStream_t stream) {
  return Runtime::get().destroy_stream(stream) ? kSuccess : fail(kInvalidResourceHandle);
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

int cudaStreamIsCapturing(cudaStream_t handle, int* status) {
  if (status == nullptr) return fail(kInvalidValue);
  *status = 0;
  return with_stream(handle, [](Stream&) { return kSuccess; });
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
  *event = Runtime::get().make_event();
  return kSuccess;
}

int cudaEventDestroy(cudaEvent_t event) {
  return Runtime::get().destroy_event(event) ? kSuccess : fail(kInvalidResourceHandle);
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
  return bytes == 0 ? nullptr : DeviceMemory::get().allocate(bytes, current_device);
}

void simulated_gpu_free(void* memory) { DeviceMemory::get().give_back(memory); }

std::int64_t simulated_gpu_copies_to_host() { return Runtime::get().copies_to_host; }
std::int64_t simulated_gpu_copies_from_host() { return Runtime::get().copies_from_host; }

void simulated_gpu_delay(int microseconds) { delay_microseconds() = microseconds; }
}
