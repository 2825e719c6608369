// A CUDA runtime for tests without a GPU. It has CUDA's names, and its GPUs are simulated in host memory. Its library
// is libcudart.so.13, which takes the place of NVIDIA's. LOCKSTEP_SIMULATED_GPUS says how many GPUs there are; else
// there is none. Functions return CUDA's error codes. Any thread may call any function.
//
// Each stream is a queue with a thread of its own. Copies are asynchronous for all host memory, as CUDA's are for
// pinned memory. The default stream is a stream like others, which waits for none of them. So a missing wait shows in
// tests.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simulated_gpu {

// CUDA's error codes.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kMemoryAllocation = 2;
inline constexpr int kNoDevice = 100;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidResourceHandle = 400;
inline constexpr int kNotReady = 600;
inline constexpr int kNotPermitted = 800;
inline constexpr int kNotSupported = 801;
inline constexpr int kCaptureUnsupported = 900;
inline constexpr int kIllegalState = 401;

}  // namespace simulated_gpu

extern "C" {

using cudaStream_t = void*;  // null: the default stream of the calling thread's device
using cudaEvent_t = void*;
using cudaHostFn_t = void (*)(void* data);

int cudaRuntimeGetVersion(int* version);
int cudaDriverGetVersion(int* version);
int cudaGetDeviceCount(int* count);
int cudaGetDeviceProperties(void* properties, int device);  // not supported
int cudaGetDevice(int* device);
int cudaSetDevice(int device);  // for the calling thread; makes the device's context
int cudaDeviceGetPCIBusId(char* name, int length, int device);
int cudaDeviceSynchronize();

int cudaMalloc(void** memory, std::size_t bytes);
int cudaFree(void* memory);  // waits for all work of the memory's device
int cudaMemcpy(void* to, const void* from, std::size_t bytes, int kind);
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, cudaStream_t stream);
int cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream);

int cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
int cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
int cudaStreamDestroy(cudaStream_t stream);  // returns at once; the stream's work goes on
int cudaStreamSynchronize(cudaStream_t stream);
int cudaStreamQuery(cudaStream_t stream);
int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
// Nothing can be recorded, and work of a stream that is captured is lost. The modes: 0 global, in which other threads
// must leave events alone, 1 of the thread alone, 2 relaxed.
int cudaStreamBeginCapture(cudaStream_t stream, int mode);
int cudaStreamEndCapture(cudaStream_t stream, void** graph);  // null
int cudaStreamIsCapturing(cudaStream_t stream, int* status);
int cudaThreadExchangeStreamCaptureMode(int* mode);
int cudaStreamGetDevice(cudaStream_t stream, int* device);
int cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);

int cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
int cudaEventDestroy(cudaEvent_t event);
int cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
int cudaEventQuery(cudaEvent_t event);
int cudaEventSynchronize(cudaEvent_t event);
int cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

const char* cudaGetErrorString(int error);
const char* cudaGetErrorName(int error);
int cudaGetLastError();

// The following functions are for simulated kernels and for tests.

// Returns the address at which kernels access the memory; null where it is not a GPU's.
void* simulated_gpu_memory(const void* device_address);

// Returns the device whose allocation has all these bytes; -1 where there is none.
int simulated_gpu_device(const void* device_address, std::size_t bytes);

// Memory of the calling thread's device, or null where none is left. It is free at once when it is given back, whatever
// streams still do.
void* simulated_gpu_allocate(std::size_t bytes);
void simulated_gpu_free(void* memory);

// The numbers of this process's copies between host and devices so far, by cudaMemcpy and cudaMemcpyAsync.
std::int64_t simulated_gpu_copies_to_host();
std::int64_t simulated_gpu_copies_from_host();

// From now on each piece of work of a stream sleeps so long before it begins. The first value is that of
// LOCKSTEP_SIMULATED_GPU_DELAY, or 0.
void simulated_gpu_delay(int microseconds);
}
