// What a launcher writes to those that it has started on other hosts, after what they are to run: an order a line.
#pragma once

#include <deque>
#include <string>

#include "launch/lines.h"
#include "lockstep/deadline.h"

namespace lockstep {

inline constexpr const char* kAlive = "alive\n";
inline constexpr const char* kEnd = "end\n";  // another host's rank has failed
std::string order_to_send(int signal);

// The reading end: this process's standard input.
// A command and its environment may be long.
inline constexpr std::size_t kLongestOrder = std::size_t{16} << 20;

class Orders {
 public:
  Orders();

  // The first line. Throws ClusterError where none comes.
  std::string first(Deadline deadline);

  int descriptor() const { return ended_ ? -1 : 0; }

  struct Order {
    enum class Kind { none, end, signal } kind = Kind::none;
    int signal = 0;
  };

  // The next order. SIGKILL, once, when the other launcher is gone or has long been silent.
  Order next();

 private:
  void read_some();

  Lines lines_{kLongestOrder};
  std::deque<std::string> waiting_;
  bool ended_ = false;
  Deadline silence_;
};

}  // namespace lockstep
