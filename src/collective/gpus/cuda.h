// The CUDA runtime, as far as Groups need it. It is loaded when a Group first gets a buffer on a GPU, so a machine
// without a GPU needs none. Streams and events may be those of other libraries in the process, such as LibTorch.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "lockstep/base/deadline.h"

namespace lockstep::collective::gpus {

using CudaStream = void*;   // a cudaStream_t
using CudaEvent = void*;    // a cudaEvent_t
using CudaContext = void*;  // a CUcontext

// The functions that we call. Each returns a cudaError_t, which is 0 for success.
#define LOCKSTEP_CUDA_FUNCTIONS(each)                                                                            \
  each(cudaGetDevice, int(int* device)) each(cudaSetDevice, int(int device))                                     \
      each(cudaDeviceGetPCIBusId, int(char* name, int length, int device))                                       \
          each(cudaMemcpyAsync, int(void* to, const void* from, std::size_t bytes, int kind, CudaStream stream)) \
              each(cudaStreamCreateWithFlags, int(CudaStream * made, unsigned flags))                            \
                  each(cudaStreamIsCapturing, int(CudaStream stream, int* status))                               \
                      each(cudaThreadExchangeStreamCaptureMode, int(int* mode))                                  \
                          each(cudaStreamDestroy, int(CudaStream stream))                                        \
                              each(cudaStreamWaitEvent, int(CudaStream stream, CudaEvent event, unsigned flags)) \
                                  each(cudaEventCreateWithFlags, int(CudaEvent * made, unsigned flags))          \
                                      each(cudaEventDestroy, int(CudaEvent event))                               \
                                          each(cudaEventQuery, int(CudaEvent event))                             \
                                              each(cudaEventRecord, int(CudaEvent event, CudaStream stream))     \
                                                  each(cudaGetErrorString, const char*(int error))

// The driver's functions that we call. Each returns a CUresult, which is 0 for success.
#define LOCKSTEP_CUDA_DRIVER_FUNCTIONS(each)                                        \
  each(cuInit, int(unsigned flags)) each(cuDeviceGet, int(int* device, int number)) \
      each(cuDevicePrimaryCtxRetain, int(CudaContext * context, int device))        \
          each(cuCtxPushCurrent_v2, int(CudaContext)) each(cuCtxPopCurrent_v2, int(CudaContext * context))

struct Cuda {
#define LOCKSTEP_MEMBER(name, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr;
  LOCKSTEP_CUDA_FUNCTIONS(LOCKSTEP_MEMBER)
  LOCKSTEP_CUDA_DRIVER_FUNCTIONS(LOCKSTEP_MEMBER)
#undef LOCKSTEP_MEMBER
};

// Throws InvalidArgument where there is no CUDA runtime. Any thread.
const Cuda& cuda();
bool has_cuda();  // else cuda() throws

// Throws Error, naming the function, where `error` is not 0.
void require_cuda(int error, const char* function);

// The PCI address of a GPU of this host, which tells it from the host's others in every process.
std::string pci_address(int device);

// The calling thread's device, while it lives. The thread's earlier device is not touched: cudaSetDevice, as most
// functions of the runtime, would make a context there, of some hundred megabytes.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool has_pushed_ = false;
};

// Calls act() on a device at an object's end, when nobody can be told of an error.
template <class Act>
void end_on(int device, const Act& act) noexcept {
  try {
    const OnDevice here(device);
    act();
  } catch (const std::exception&) {  // the device has failed, and so has what it held
  }
}

// An event of a device.
struct Event {
  CudaEvent event = nullptr;
  int device = 0;
};

// A moment in a stream. Its copies are handles; with the last one the event goes back to its pool. Any thread.
using Moment = std::shared_ptr<const Event>;

// A device's stream of our own, and events.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  CudaStream get() const { return stream_; }

  // The moment when all work that this stream, or another one of the device, has by now is done.
  Moment now() { return now_in(stream_); }
  Moment now_in(CudaStream stream);

  // Later work of this stream, or of another one of the device, waits for the moment.
  void wait_for(const Moment& moment) { wait_in(stream_, moment); }
  void wait_in(CudaStream stream, const Moment& moment);

 private:
  struct Pool;

  const int device_;
  const std::shared_ptr<Pool> pool_;
  CudaStream stream_ = nullptr;
};

// Returns true once the moment has come. Throws Error where the device reports one.
bool has_come(const Moment& moment);

// True where the work of a stream of the thread's device becomes a CUDA graph.
bool is_captured(CudaStream stream);

// From here on what the calling thread does is allowed while other threads capture their streams.
void leave_captures_alone();

// Waits in steps of at most a millisecond until `holds`. Returns false where the deadline passed before.
bool wait_until(const std::function<bool()>& holds, Deadline deadline);

}  // namespace lockstep::collective::gpus
