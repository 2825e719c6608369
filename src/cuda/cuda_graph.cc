// CUDA graphs. Capture goes as torch.cuda.graph does it: on a stream of its own, which waits for the current one.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/recorded_work.h"

namespace lockstep {
namespace {

class CudaGraph final : public RecordedWork {
 public:
  CudaGraph(c10::Device device, const std::function<void()>& work) : device_(device) {
    const c10::cuda::CUDAGuard on_device(device_);
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    at::cuda::CUDAEvent earlier_work;
    earlier_work.record(c10::cuda::getCurrentCUDAStream(device_.index()));
    earlier_work.block(stream);
    const c10::cuda::CUDAStreamGuard on_stream(stream);
    graph_.capture_begin();
    try {
      work();
    } catch (...) {
      end_after_failure();
      throw;
    }
    graph_.capture_end();
  }

  void replay() override {
    const c10::cuda::CUDAGuard on_device(device_);
    graph_.replay();
  }

 private:
  // A capture that failed must end before its stream is used again; how it ends is no news.
  void end_after_failure() {
    try {
      graph_.capture_end();
    } catch (const c10::Error&) {
    }
  }

  const c10::Device device_;
  at::cuda::CUDAGraph graph_;
};

[[maybe_unused]] const bool set = [] {
  work_recorder() = [](c10::Device device, const std::function<void()>& work) {
    return std::make_unique<CudaGraph>(device, work);
  };
  return true;
}();

}  // namespace
}  // namespace lockstep
