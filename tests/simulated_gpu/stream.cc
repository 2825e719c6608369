#include "stream.h"

#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

namespace simulated_gpu {
namespace {

thread_local bool is_stream = false;

}  // namespace

std::atomic<int>& delay_microseconds() {
  static auto* const delay = [] {
    const char* const given = std::getenv("LOCKSTEP_SIMULATED_GPU_DELAY");
    return new std::atomic<int>(given == nullptr ? 0 : std::atoi(given));
  }();
  return *delay;
}

bool in_stream() { return is_stream; }

void Stream::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (capture_mode_ >= 0) return;
  queue_.push_back(std::move(work));
  ++pushed_;
  if (!std::exchange(begun_, true)) {
    std::thread([self = shared_from_this()] { self->do_work(); }).detach();  // it may be stuck when the program ends
  }
  changed_.notify_all();
}

void Stream::capture(int mode) {
  const std::lock_guard lock(mutex_);
  capture_mode_ = mode;
}

int Stream::capture_mode() {
  const std::lock_guard lock(mutex_);
  return capture_mode_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, until = pushed_] { return done_ >= until; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == pushed_;
}

void Stream::do_work() {
  is_stream = true;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (const int delay = delay_microseconds(); delay > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    work();
    work = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void Event::record(Stream& stream) {
  const auto record = std::make_shared<Reached>();
  const std::lock_guard lock(mutex_);
  last_ = record;
  stream.push([record] {
    record->at = std::chrono::steady_clock::now();
    record->is_reached = true;
    record->is_reached.notify_all();
  });
}

void Event::make_wait(Stream& stream) {
  if (const auto record = last()) stream.push([record] { record->is_reached.wait(false); });
}

bool Event::has_come() {
  const auto record = last();
  return !record || record->is_reached;
}

void Event::synchronize() {
  if (const auto record = last()) record->is_reached.wait(false);
}

std::chrono::steady_clock::time_point Event::when() { return last()->at; }

Event::Record Event::last() {
  const std::lock_guard lock(mutex_);
  return last_;
}

}  // namespace simulated_gpu
