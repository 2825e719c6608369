// What a launcher writes to the launchers that it started on other hosts, after their HostPart: one message a line.
#pragma once

#include <deque>
#include <string>

#include "launch/lines.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

inline constexpr const char* kAlive = "alive\n";
inline constexpr const char* kEnd = "end\n";  // another host's rank has failed
std::string signal_message(int signal);

// A command and its environment may be long.
inline constexpr std::size_t kLongestMessage = std::size_t{16} << 20;

// The reading end: this process's standard input.
class ControlProtocol {
 public:
  ControlProtocol();

  // The first line. Throws ClusterError where none comes.
  std::string first(Deadline deadline);

  int descriptor() const { return ended_ ? -1 : 0; }

  struct Message {
    enum class Kind { none, end, signal, launcher_lost } kind = Kind::none;
    int signal = 0;
  };

  // The next message. `launcher_lost`, once, when the other launcher is gone or has long been silent.
  Message next();

 private:
  void read_some();

  Lines lines_{{.longest = kLongestMessage}};
  std::deque<std::string> waiting_;
  bool ended_ = false;
  Deadline silence_;
};

}  // namespace lockstep::launch
