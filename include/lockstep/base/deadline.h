// A moment after which a wait gives up. Every call that can wait takes one.
#pragma once

#include <chrono>
#include <limits>

namespace lockstep {

// The defaults of options that bound a wait, in seconds. The option's comment says what it bounds.
inline constexpr double kStartTimeoutSeconds = 300;     // until all processes of a job have come
inline constexpr double kDefaultTimeoutSeconds = 1800;  // a step, and a collective call
inline constexpr double kRegroupTimeoutSeconds = 10;    // after a loss, until the processes that remain have come
inline constexpr double kReconnectTimeoutSeconds = 60;  // a server, or the chief, that does not answer
inline constexpr double kLostHostSeconds = 60;          // a host that does not answer
inline constexpr double kElasticLostHostSeconds = 3;    // a host that does not answer, in a job that goes on without it

// A value; any thread may copy and read it.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // The moment `timeout` from now.
  static Deadline after(std::chrono::duration<double> timeout) { return Deadline(Clock::now(), timeout); }

  // For waits that end by another's decision alone, such as a thread's for its next task.
  static Deadline never() { return after(std::chrono::duration<double>(std::numeric_limits<double>::infinity())); }

  Clock::time_point time() const noexcept { return time_; }
  bool passed() const noexcept { return Clock::now() >= time_; }

  // The time since this deadline was made: how long a wait from then on has taken by now.
  std::chrono::duration<double> waited() const noexcept { return Clock::now() - start_; }

 private:
  Deadline(Clock::time_point start, std::chrono::duration<double> timeout)
      : start_(start),
        time_(timeout > kLongest ? Clock::time_point::max()
                                 : start + std::chrono::duration_cast<Clock::duration>(timeout)) {}

  static constexpr std::chrono::duration<double> kLongest =
      std::chrono::hours(24 * 365 * 50);  // what the clock can hold

  Clock::time_point start_;
  Clock::time_point time_;
};

}  // namespace lockstep
