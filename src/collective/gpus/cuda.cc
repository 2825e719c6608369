#include "collective/gpus/cuda.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
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
constexpr std::array kDriversNames{"libcuda.so.1"};

Cuda load_cuda() {
  const OpenedLibrary runtime("the CUDA runtime", kNames, "a buffer is on a GPU, and there is no CUDA runtime");
  const OpenedLibrary driver("the CUDA driver", kDriversNames, "a buffer is on a GPU, and there is no CUDA driver");
  Cuda found;
#define LOCKSTEP_FIND(name, ...) runtime.find(#name, found.name);
  LOCKSTEP_CUDA_FUNCTIONS(LOCKSTEP_FIND)
#undef LOCKSTEP_FIND
#define LOCKSTEP_FIND(name, ...) driver.find(#name, found.name);
  LOCKSTEP_CUDA_DRIVER_FUNCTIONS(LOCKSTEP_FIND)
#undef LOCKSTEP_FIND
  return found;
}

void require_driver(int error, const char* function) {
  if (error != 0) throw Error(text(function, " failed with the CUDA driver's error ", error));
}

// The context that the runtime uses on the device. It is kept until the process ends, as the runtime keeps it.
CudaContext context_of(int device) {
  static Mutex mutex;
  static auto& contexts = *new std::map<int, CudaContext>;
  MutexLock lock(mutex);
  auto& context = contexts[device];
  if (context == nullptr) {
    int handle = 0;
    require_driver(cuda().cuInit(0), "cuInit");
    require_driver(cuda().cuDeviceGet(&handle, device), "cuDeviceGet");
    require_driver(cuda().cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

const Cuda& cuda() {
  static const Cuda loaded = load_cuda();
  return loaded;
}

bool has_cuda() {
  try {
    cuda();
    return true;
  } catch (const Error&) {
    return false;
  }
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

OnDevice::OnDevice(int device) {
  int now = 0;
  require_cuda(cuda().cudaGetDevice(&now), "cudaGetDevice");
  if (now == device) return;
  require_driver(cuda().cuCtxPushCurrent_v2(context_of(device)), "cuCtxPushCurrent");
  has_pushed_ = true;
}

OnDevice::~OnDevice() {
  CudaContext popped = nullptr;
  if (has_pushed_) cuda().cuCtxPopCurrent_v2(&popped);
}

// Events that are not in use.
struct Stream::Pool {
  explicit Pool(int device_of_events) : device(device_of_events) {}
  ~Pool() {
    end_on(device, [this] {
      MutexLock lock(mutex);
      for (const auto event : events) cuda().cudaEventDestroy(event);
    });
  }

  const int device;
  Mutex mutex;
  std::vector<CudaEvent> events LOCKSTEP_GUARDED_BY(mutex);
};

Stream::Stream(int device) : device_(device), pool_(std::make_shared<Pool>(device)) {
  const OnDevice here(device_);
  require_cuda(cuda().cudaStreamCreateWithFlags(&stream_, kNonBlocking), "cudaStreamCreateWithFlags");
}

Stream::~Stream() {
  end_on(device_, [this] { cuda().cudaStreamDestroy(stream_); });
}

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
  const Moment moment(new Event{event, device_}, [pool = pool_](const Event* used) {
    MutexLock lock(pool->mutex);
    pool->events.push_back(used->event);
    delete used;
  });
  require_cuda(cuda().cudaEventRecord(event, stream), "cudaEventRecord");
  return moment;
}

void Stream::wait_in(CudaStream stream, const Moment& moment) {
  const OnDevice here(device_);
  require_cuda(cuda().cudaStreamWaitEvent(stream, moment->event, 0), "cudaStreamWaitEvent");
}

bool has_come(const Moment& moment) {
  const OnDevice here(moment->device);
  const int error = cuda().cudaEventQuery(moment->event);
  if (error == kNotReady) return false;
  require_cuda(error, "cudaEventQuery");
  return true;
}

bool is_captured(CudaStream stream) {
  int status = 0;
  require_cuda(cuda().cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != 0;
}

void leave_captures_alone() {
  int mode = 2;  // cudaStreamCaptureModeRelaxed
  require_cuda(cuda().cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
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
