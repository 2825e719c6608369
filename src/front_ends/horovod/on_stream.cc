#include "front_ends/horovod/on_stream.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace lockstep::horovod {
namespace {

const c10::impl::DeviceGuardImplInterface& gpus() { return *c10::impl::getDeviceGuardImpl(c10::kCUDA); }

// Else LibTorch might give the memory to others while the stream uses it.
void keep_for(const c10::Stream& stream, const std::vector<Tensor>& tensors) {
  for (const auto& tensor : tensors) gpus().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// The moments between which a task's work is in its stream.
struct Moments {
  c10::Event begin{c10::kCUDA}, end{c10::kCUDA};
};

}  // namespace

c10::Stream stream_of_pool(at::Device device) { return gpus().getStreamFromGlobalPool(device); }

Work add_on_stream(collective::ProgressThread& thread, const std::optional<c10::Stream>& stream,
                   std::function<void()> task, const std::vector<Tensor>& used,
                   std::function<std::vector<Tensor>()> results) {
  const auto add = [&](std::function<void()> act) {
    return thread.add([&]() -> std::function<void()> { return std::move(act); });
  };
  if (!stream) return add(std::move(task));
  const auto moments = std::make_shared<Moments>();
  moments->begin.record(gpus().getStream(stream->device()));
  keep_for(*stream, used);
  const auto enqueued = add([moments, on = *stream, task = std::move(task)] {
    const c10::StreamGuard guard(on);
    moments->begin.block(on);
    task();
    moments->end.record(on);
  });
  auto work = std::make_shared<Work::State>();
  work->enqueued = {.join =
                        [moments, enqueued, device = stream->device(), results = std::move(results)] {
                          enqueued.wait();
                          const auto here = gpus().getStream(device);
                          moments->end.block(here);
                          if (results) keep_for(here, results());
                        },
                    .done = [moments, enqueued] { return enqueued.done() && moments->end.query(); }};
  return Work(std::move(work));
}

}  // namespace lockstep::horovod
