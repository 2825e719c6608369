// Work that a device does again without the host calling its operators one by one: a CUDA graph.
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

// Calls `work` in a way that its kernels are recorded and not run. Throws c10::Error where something in it cannot be
// recorded, such as waiting for the device.
using WorkRecorder =
    std::function<std::unique_ptr<RecordedWork>(c10::Device device, const std::function<void()>& work)>;

// The GPU's, which the module `cuda` sets when the library is loaded; empty in a build without it.
WorkRecorder& work_recorder();

}  // namespace lockstep::ops
