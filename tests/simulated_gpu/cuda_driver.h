// A CUDA driver for tests without a GPU, under the simulated runtime (cuda_runtime.h). Its library is libcuda.so.1,
// which takes the place of NVIDIA's. It has contexts alone: a device gets one when it is first retained, and a thread
// has a stack of them. LOCKSTEP_SIMULATED_GPUS says how many devices there are. Any thread may call any function.
#pragma once

namespace simulated_gpu {

// CUDA's error codes.
inline constexpr int kNoContext = 201;  // CUDA_ERROR_INVALID_CONTEXT

}  // namespace simulated_gpu

extern "C" {

using CUdevice = int;
using CUcontext = void*;

int cuInit(unsigned flags);
int cuDeviceGetCount(int* count);
int cuDeviceGet(CUdevice* device, int number);
int cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);              // makes the context
int cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active);  // 1: there is a context
int cuCtxPushCurrent_v2(CUcontext context);
int cuCtxPopCurrent_v2(CUcontext* context);
int cuCtxSetCurrent(CUcontext context);  // in the place of the current one
int cuCtxGetDevice(CUdevice* device);    // of the current context; kNoContext where there is none
}
