// Writes in a thread of its own, one thing at a time.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <thread>

namespace lockstep::checkpoint {

// One thread. The destructor waits.
class BackgroundWriter {
 public:
  // Until what was started is written. Throws what that threw, once.
  void wait();

  // True where nothing is being written, and the last write succeeded.
  bool ended() const { return ended_; }

  // Calls write() in a thread. What was started before must have been waited for.
  void start(std::function<void()> write);

 private:
  std::exception_ptr failed_;  // of thread_, once that has ended
  std::atomic<bool> ended_ = true;
  std::jthread thread_;
};

}  // namespace lockstep::checkpoint
