// The streams and events of the simulated runtime, and its counts of copies.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"
#include "stream.h"

namespace simulated_gpu {

// By their handles. A handle is the object's address. Any thread may call.
class Handles {
 public:
  static Handles& get() {
    static auto* const handles = new Handles;  // threads of streams may outlive all else
    return *handles;
  }

  cudaStream_t make_stream(int device) {
    auto stream = std::make_shared<Stream>(device);
    const std::lock_guard lock(mutex_);
    return streams_.emplace(stream.get(), stream).first->first;
  }

  cudaEvent_t make_event(int device) {
    auto event = std::make_shared<Event>(device);
    const std::lock_guard lock(mutex_);
    return events_.emplace(event.get(), event).first->first;
  }

  // Returns null for a handle that is none. Null is the handle of the default stream of `device`.
  std::shared_ptr<Stream> stream(cudaStream_t handle, int device) {
    const std::lock_guard lock(mutex_);
    if (handle == nullptr) return default_stream(device);
    const auto found = streams_.find(handle);
    return found == streams_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Event> event(cudaEvent_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    return found == events_.end() ? nullptr : found->second;
  }

  bool destroy_stream(cudaStream_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return false;
    found->second->close();
    streams_.erase(found);
    return true;
  }

  bool destroy_event(cudaEvent_t handle) {
    const std::lock_guard lock(mutex_);
    return events_.erase(handle) > 0;
  }

  void synchronize(int device) {
    std::vector<std::shared_ptr<Stream>> all;
    {
      const std::lock_guard lock(mutex_);
      all.push_back(default_stream(device));
      for (const auto& [handle, stream] : streams_) {
        if (stream->device() == device) all.push_back(stream);
      }
    }
    for (const auto& stream : all) stream->synchronize();
  }

  std::atomic<std::int64_t> copies_to_host = 0, copies_from_host = 0;

 private:
  std::shared_ptr<Stream> default_stream(int device) {
    auto& stream = defaults_[device];
    if (!stream) stream = std::make_shared<Stream>(device);
    return stream;
  }

  std::mutex mutex_;  // protects the following
  std::map<int, std::shared_ptr<Stream>> defaults_;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams_;
  std::map<cudaEvent_t, std::shared_ptr<Event>> events_;
};

}  // namespace simulated_gpu
