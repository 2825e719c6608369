// Streams and events of simulated GPUs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace simulated_gpu {

// How long each piece of work sleeps before it begins.
std::atomic<int>& delay_microseconds();

// Returns true in the threads of streams, which may not call CUDA.
bool in_stream();

// A queue of work that a thread of its own does in order. The thread begins with the first work and shares the stream's
// ownership. Any thread may call.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(int device) : device_(device) {}

  int device() const { return device_; }
  void push(std::function<void()> work);

  // While a stream is captured, its work is dropped. `mode` is CUDA's; -1: it is not captured.
  void capture(int mode);
  int capture_mode();

  // The thread ends after the work that is queued.
  void close();

  // Waits for the work that was pushed before the call.
  void synchronize();
  bool is_idle();

 private:
  void do_work();

  const int device_;

  std::mutex mutex_;  // protects the following
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t pushed_ = 0, done_ = 0;
  bool begun_ = false, closed_ = false;
  int capture_mode_ = -1;
};

// A moment in a stream that may be recorded again and again. Any thread may call.
class Event {
 public:
  explicit Event(int device) : device_(device) {}

  int device() const { return device_; }
  void record(Stream& stream);

  // The following are about the last record at the time of the call; an event without one has come.
  void make_wait(Stream& stream);
  bool has_come();
  void synchronize();
  std::chrono::steady_clock::time_point when();  // it has come

 private:
  struct Reached {
    std::atomic<bool> is_reached = false;           // by the stream
    std::chrono::steady_clock::time_point at = {};  // when; constant from then on
  };
  using Record = std::shared_ptr<Reached>;

  Record last();

  const int device_;

  std::mutex mutex_;  // protects the following
  Record last_;
};

}  // namespace simulated_gpu
