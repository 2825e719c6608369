// Work that another thread does on a GPU, in the order of the stream of the thread that asked for it.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "collective/work.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::horovod {

// A stream that other threads' work may go on: one of LibTorch's for the device.
c10::Stream stream_of_pool(at::Device device);

// Adds `task` to the thread. Its operators go on `stream`, after what the caller's current stream has at the call. The
// task may use the memory of `used`. Where the work is waited for, the current stream waits in the place of the host,
// and may use the tensors that `results` then returns. The work is done when the GPU is done. Empty: the task is in
// host memory, as ProgressThread::add.
Work add_on_stream(collective::ProgressThread& thread, const std::optional<c10::Stream>& stream,
                   std::function<void()> task, const std::vector<Tensor>& used = {},
                   std::function<std::vector<Tensor>()> results = nullptr);

}  // namespace lockstep::horovod
