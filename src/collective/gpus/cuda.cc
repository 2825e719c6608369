#include "collective/gpus/cuda.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::gpus {
namespace {

constexpr int kNotReady = 600;          // cudaErrorNotReady
constexpr unsigned kNonBlocking = 1;    // cudaStreamNonBlocking
constexpr unsigned kWithoutTiming = 2;  // cudaEventDisableTiming
constexpr std::array kNames{"libcudart.so.13", "libcudart.so.12"};

Cuda load_cuda() {
  const OpenedLibrary library("the CUDA runtime", kNames, "a buffer is on a GPU, and there is no CUDA runtime");
  Cuda found;
#define LOCKSTEP_FIND(name, ...) library.find(#name, found.name);
  LOCKSTEP_CUDA_FUNCTIONS(LOCKSTEP_FIND)
#undef LOCKSTEP_FIND
  return found;
}

}  // namespace

const Cuda& cuda() {
  static const Cuda loaded = load_cuda();
  return loaded;
}

void require_cuda(int error, const char* function) {
  if (error != 0) throw Error(text(function, ": ", cuda().cudaGetErrorString(error), " (CUDA's error ", error, ")"));
}

std::string pci_address(int device) {
  std::array<char, 32> name{};
  require_cuda(cuda().cudaDeviceGetPCIBusId(name.data(), static_cast<int>(name.size()), device),
               "cudaDeviceGetPCIBusId");
  return name.data();
}

OnDevice::OnDevice(int device) : device_(device) {
  require_cuda(cuda().cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device_) require_cuda(cuda().cudaSetDevice(device_), "cudaSetDevice");
}

OnDevice::~OnDevice() {
  if (before_ != device_) cuda().cudaSetDevice(before_);
}

// Events that are not in use.
struct Stream::Pool {
  ~Pool() {
    for (const auto event : events) cuda().cudaEventDestroy(event);
  }

  Mutex mutex;
  std::vector<CudaEvent> events LOCKSTEP_GUARDED_BY(mutex);
};

Stream::Stream(int device) : device_(device), pool_(std::make_shared<Pool>()) {
  const OnDevice here(device_);
  require_cuda(cuda().cudaStreamCreateWithFlags(&stream_, kNonBlocking), "cudaStreamCreateWithFlags");
}

Stream::~Stream() { cuda().cudaStreamDestroy(stream_); }

Moment Stream::now_in(CudaStream stream) {
  const OnDevice here(device_);
  CudaEvent event = nullptr;
  {
    MutexLock lock(pool_->mutex);
    if (!pool_->events.empty()) {
      event = pool_->events.back();
      pool_->events.pop_back();
    }
  }
  if (event == nullptr) {
    require_cuda(cuda().cudaEventCreateWithFlags(&event, kWithoutTiming), "cudaEventCreateWithFlags");
  }
  Moment moment(event, [pool = pool_](CudaEvent used) {
    MutexLock lock(pool->mutex);
    pool->events.push_back(used);
  });
  require_cuda(cuda().cudaEventRecord(event, stream), "cudaEventRecord");
  return moment;
}

void Stream::wait_in(CudaStream stream, const Moment& moment) {
  const OnDevice here(device_);
  require_cuda(cuda().cudaStreamWaitEvent(stream, moment.get(), 0), "cudaStreamWaitEvent");
}

bool has_come(const Moment& moment) {
  const int error = cuda().cudaEventQuery(moment.get());
  if (error == kNotReady) return false;
  require_cuda(error, "cudaEventQuery");
  return true;
}

bool wait_until(const std::function<bool()>& holds, Deadline deadline) {
  constexpr std::chrono::microseconds kShortest(20), kLongest(1000);
  for (auto pause = kShortest; !holds(); pause = std::min(2 * pause, kLongest)) {
    if (deadline.passed()) return holds();
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace lockstep::collective::gpus
