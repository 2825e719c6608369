// CUDA graphs. Captured as by torch.cuda.graph: on a separate stream, when the device has done all earlier work.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/traced_program.h"

namespace lockstep::ops {
namespace {

class CudaGraph final : public RecordedWork {
 public:
  CudaGraph(c10::Device device, const std::function<void()>& work) : device_(device) {
    const c10::cuda::CUDAGuard on_device(device_);
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    const c10::cuda::CUDAStreamGuard on_stream(stream);
    // Other threads, such as one that makes batches, may go on with work of their own.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
      graph_.capture_end();
    } catch (...) {
      graph_.abandon();
      throw;
    }
  }

  void replay() override {
    const c10::cuda::CUDAGuard on_device(device_);
    graph_.replay();
  }

 private:
  class Graph : public at::cuda::CUDAGraph {
   public:
    // Ends a failed capture, so that its stream, allocator and generators can be used again. LibTorch's capture_end
    // throws half way where CUDA has invalidated the capture, so the rest of it follows here; errors are ignored, since
    // the caller rethrows the first one.
    void abandon() {
      const auto attempt = [](const auto& end) {
        try {
          end();
        } catch (const c10::Error&) {
        }
      };
      if (!capture_ended_) attempt([&] { capture_end(); });
      if (capture_ended_) return;
      attempt([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_); });
      attempt([&] { c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_); });
      for (auto& [generator, increment] : captured_generator_states_) generator->capturing_ = false;
    }
  };

  const c10::Device device_;
  Graph graph_;
};

[[maybe_unused]] const bool set = [] {
  work_recorder() = [](c10::Device device, const std::function<void()>& work) {
    return std::make_unique<CudaGraph>(device, work);
  };
  return true;
}();

}  // namespace
}  // namespace lockstep::ops
