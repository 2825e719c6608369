// For tests: groups that move what they are given from GPU to GPU, by NCCL. GPUs and NCCL are simulated
// (tests/simulated_gpu/), so tests of buffers in host memory are also tests of GPUs.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/calls.h"
#include "collective/gpus/cuda.h"
#include "collective/ranks_testing.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/group_wrappers.h"

// Functions of the simulated libraries, whose headers say what they do.
extern "C" {
int cudaMalloc(void** memory, std::size_t bytes);
int cudaStreamSynchronize(void* stream);
int cudaStreamBeginCapture(void* stream, int mode);
int cudaStreamEndCapture(void* stream, void** graph);
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active);
void* simulated_gpu_memory(const void* device_address);
void simulated_gpu_free(void* memory);
void simulated_gpu_delay(int microseconds);
void simulated_nccl_fault(const char* what, int rank);
}

namespace lockstep::collective::gpus {

inline const bool kGpusAreSimulated = ::setenv("LOCKSTEP_SIMULATED_GPUS", "16", /*overwrite=*/0) == 0;

// Bytes on a GPU. They are written before the constructor returns.
class GpuMemory {
 public:
  GpuMemory(int device, const void* from, std::size_t bytes) : bytes_(bytes) {
    const OnDevice here(device);
    if (bytes == 0) return;
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes), 0);
    memory_ = {memory, [](void* used) { simulated_gpu_free(used); }};
    write(from);
  }

  void* get() const { return memory_.get(); }

  void write(const void* from) const {
    if (bytes_ > 0) std::memcpy(simulated_gpu_memory(get()), from, bytes_);
  }
  void read(void* to) const {
    if (bytes_ > 0) std::memcpy(to, simulated_gpu_memory(get()), bytes_);
  }

 private:
  const std::size_t bytes_;
  std::shared_ptr<void> memory_;
};

// Copies the buffers of each call to a GPU, and the results back.
class ThroughGpu final : public Wrapper {
 public:
  ThroughGpu(std::shared_ptr<GroupBackend> inner, int device) : Wrapper(std::move(inner)), device_(device) {}

  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    return std::make_shared<ThroughGpu>(Wrapper::make(members, deadline), device_);
  }

  const char* run(const Call& call, Deadline deadline) override {
    if (call.kind == Call::Kind::barrier) return Wrapper::run(call, deadline);
    return exchange({&call, 1}, deadline);
  }

  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    std::vector<Call> moved;
    std::vector<std::pair<GpuMemory, Buffer>> outputs;
    std::vector<GpuMemory> inputs;
    const MemoryDevice gpu{MemoryDevice::Type::cuda, static_cast<std::int16_t>(device_)};
    for (const auto& call : calls) {
      auto& on_gpu = moved.emplace_back(call);
      const GpuMemory output(device_, call.output.data, call.output.data == nullptr ? 0 : call.output.bytes());
      on_gpu.output.data = output.get();
      outputs.emplace_back(output, call.output);
      if (call.input.data == call.output.data) {
        on_gpu.input.data = output.get();
      } else {
        on_gpu.input.data = inputs.emplace_back(device_, call.input.data, call.input.bytes()).get();
      }
      on_gpu.input.device = on_gpu.output.device = gpu;
    }
    const auto enqueued = inner().enqueue(moved, deadline);
    enqueued.join();
    const OnDevice here(device_);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), 0);  // of the calls
    for (const auto& [memory, buffer] : outputs) memory.read(buffer.data);
    return "through a GPU";
  }

 private:
  const int device_;
};

// For RankOptions::wrap: rank r uses the GPU with number r. Without a gpu_backend groups stay as they are.
inline std::function<Group(const Group&)> through_gpus(const std::string& gpu_backend) {
  if (gpu_backend.empty()) return [](const Group& group) { return group; };
  return [gpu_backend](const Group& group) {
    const auto on_gpus = with_gpus(group, gpu_backend);
    return on_gpus.with_backend(std::make_shared<ThroughGpu>(on_gpus.shared_backend(), group.rank()));
  };
}

inline double seconds_of(const std::function<void()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Numbers on the GPU of a rank, and a stream that uses them.
class OnGpu {
 public:
  OnGpu(const Group& group, std::vector<double> values)
      : stream_(group.rank()),
        values_(std::move(values)),
        memory_(stream_.device(), values_.data(), values_.size() * sizeof(double)) {}

  Buffer buffer() const {
    return {memory_.get(),
            values_.size(),
            DType::float64,
            {MemoryDevice::Type::cuda, static_cast<std::int16_t>(stream_.device())}};
  }

  Call all_reduce(ReduceOp op = ReduceOp::sum) const {
    auto call = Call::all_reduce(buffer(), op);
    call.stream = stream_.get();
    return call;
  }

  Call recv(int from) const {
    auto call = Call::recv(buffer(), from);
    call.stream = stream_.get();
    return call;
  }

  CudaStream stream() const { return stream_.get(); }

  // Returns what the stream sees, after all that it was told to do.
  std::vector<double> values() const {
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), 0);
    std::vector<double> read(values_.size());
    memory_.read(read.data());
    return read;
  }

 private:
  const Stream stream_;
  const std::vector<double> values_;
  const GpuMemory memory_;
};

// The parameter is the ranks' backend in host memory.
class GroupsOnGpus : public testing::TestWithParam<std::string> {
 protected:
  void TearDown() override {
    simulated_nccl_fault(nullptr, -1);
    simulated_gpu_delay(0);
  }

  // Ranks that can move buffers on GPUs by NCCL alone.
  static std::vector<std::exception_ptr> run(int size, const std::function<void(const Group&)>& body,
                                             const std::string& gpu_backend = "nccl") {
    RankOptions options{.size = size};
    options.group.backend = GetParam();
    options.wrap = [&](const Group& group) { return with_gpus(group, gpu_backend); };
    return run_ranks(options, body);
  }
};

}  // namespace lockstep::collective::gpus
