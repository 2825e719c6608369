// What a launcher writes to the launchers that it started on other hosts, after their HostPart, and what these write to
// their standard error for it: one message a line.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "launch/lines.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

inline constexpr const char* kBegin = "begin\n";  // in answer to kPartIsHereMessage: its ranks may be started
inline constexpr const char* kAlive = "alive\n";
inline constexpr const char* kEnd = "end\n";      // another host's rank has failed
inline constexpr const char* kLeave = "leave\n";  // the ranks of this host are to leave an elastic job
std::string signal_message(int signal);

// To the other launcher: that of a host is there. It starts no ranks before that one has heard it, which therefore
// knows of each host whether ranks may run there.
inline constexpr const char* kPartIsHereMessage = "lockstep part: is here\n";

// The launcher says that its ranks have ended, and how. The launcher of an elastic job's host then holds its store
// until it is told SIGKILL, or nobody needs the store any more.
std::string ranks_ended_message(int status);
std::optional<int> status_in(const std::string& line);  // of such a message, without the line's end

// To the other launcher, before that message: the ranks found that no member of the job is left on any host.
inline constexpr const char* kNobodyIsLeftMessage = "lockstep part: nobody is left\n";

// After which the other launcher counts as lost. Long, because it may be stopped for a while; its end, and that of the
// connection, are noticed without it. An elastic job does without its launcher, and waits for nothing.
inline constexpr double kLongSilenceSeconds = 300;
inline constexpr double kShortSilenceSeconds = 5;

// A command and its environment may be long.
inline constexpr std::size_t kLongestMessage = std::size_t{16} << 20;

// The reading end: this process's standard input.
class ControlProtocol {
 public:
  ControlProtocol();

  // The first line. Throws ClusterError where none comes.
  std::string first(Deadline deadline);

  // Waits until ranks may be started. Throws ClusterError where that is not said, or the job is to end.
  void wait_for_begin(Deadline deadline);

  int descriptor() const { return ended_ ? -1 : 0; }

  struct Message {
    enum class Kind { none, end, leave, signal, launcher_lost } kind = Kind::none;
    int signal = 0;
  };

  // The next message. `launcher_lost`, once: the other launcher is gone, or the connection to it.
  Message next();

  // Whether nothing has come for so long, or the input has ended. The other launcher sends a sign of life every second.
  bool silent_for(double seconds);

 private:
  void read_some();

  Lines lines_{{.longest = kLongestMessage}};
  std::deque<std::string> waiting_;
  bool ended_ = false, told_end_ = false;
  Deadline::Clock::time_point heard_;
};

}  // namespace lockstep::launch
