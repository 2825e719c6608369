// Work that is recorded on a device and replayed without calling its operators one by one: a CUDA graph.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace lockstep::ops {

class RecordedWork {
 public:
  virtual ~RecordedWork() = default;

  // Enqueues the work once more, on the same memory.
  virtual void replay() = 0;
};

// Calls `work` so that its kernels are recorded and not run. Throws c10::Error where something in it cannot be
// recorded, such as waiting for the device.
using WorkRecorder =
    std::function<std::unique_ptr<RecordedWork>(c10::Device device, const std::function<void()>& work)>;

// The recorder for GPUs, which the module `cuda` sets when the library is loaded; empty in a build without it.
WorkRecorder& work_recorder();

}  // namespace lockstep::ops
