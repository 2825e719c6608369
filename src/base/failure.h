// Failures of a Group: the reason why one broke, and places where a test breaks one.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

// The reason why a Group broke, in a form that fits into shared memory and into a message.
struct Failure {
  enum class Kind : std::uint32_t { aborted, peer_lost, deadline };
  static constexpr std::size_t kMostRanks = 8;  // that a record names

  Kind kind = Kind::aborted;
  std::int32_t reporter = -1;  // the rank that saw it
  std::uint32_t rank_count = 0;
  std::array<std::int32_t, kMostRanks> ranks{};  // who is to blame: the lost one, or those that did not come
  double seconds = 0;                            // how long the reporter waited
  std::array<char, 24> operation{};
  std::array<char, 160> reason{};  // shortened to fit

  static Failure aborted(int reporter, const std::string& reason);
  static Failure peer_lost(int reporter, int rank, const std::string& how);
  static Failure deadline(int reporter, const std::vector<int>& ranks, double seconds, const std::string& operation);

  std::vector<int> blamed() const;

  // A copy without values that a group of `size` ranks cannot have, for a Failure from a connection, which is not
  // trusted.
  Failure checked(int size) const;

  // Throws Aborted, PeerLost or DeadlineExceeded on rank `rank`.
  [[noreturn]] void raise(int rank, std::int64_t generation) const;
};

// Named places where a test makes something go wrong: the wrapper that injects faults sets the calling thread's hook.

using FailHook = std::function<void(const char* place)>;

inline thread_local FailHook* fail_hook = nullptr;

inline void fail_point(const char* place) {
  if (fail_hook != nullptr) [[unlikely]]
    (*fail_hook)(place);
}

}  // namespace lockstep
