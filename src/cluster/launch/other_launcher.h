// A launcher, and the launchers that it started on other hosts: their messages, and the end of the connection.
#pragma once

#include <deque>
#include <optional>
#include <sstream>
#include <string>

#include "cluster/launch/child.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

// To a host's launcher, by its standard input, after its HostPart: one message a line. A number of a signal replaces
// that signal.
inline constexpr const char* kBegin = "begin\n";  // in answer to kPartIsHereMessage: its ranks may be started
inline constexpr const char* kAlive = "alive\n";  // once a second
inline constexpr const char* kEnd = "end\n";      // another host's rank has failed
inline constexpr const char* kLeave = "leave\n";  // the ranks of this host are to leave an elastic job
std::string signal_message(int signal);

// From a host's launcher, by its standard error, among the lines that its ranks print: the launcher is there. It starts
// no ranks before the other launcher has heard so, which therefore knows of each host whether ranks may run there.
inline constexpr const char* kPartIsHereMessage = "lockstep part: is here\n";

// The ranks have found that no member of the job is left on any host. Comes before the next message.
inline constexpr const char* kNobodyIsLeftMessage = "lockstep part: nobody is left\n";

// The ranks have ended, and how. The launcher of an elastic job's host then holds its store until it is told SIGKILL,
// or nobody needs the store any more.
std::string ranks_ended_message(int status);
std::optional<int> status_in(const std::string& line);  // of such a message, without the line's end

// After this silence the other launcher counts as lost. Long, because the launcher may be stopped for a while; its end,
// and the connection's, are noticed earlier. An elastic job does without its launcher, and waits for nothing.
inline constexpr double kLongSilenceSeconds = 300;
inline constexpr double kShortSilenceSeconds = 5;

// A command and its environment may be long.
inline constexpr std::size_t kLongestMessage = std::size_t{16} << 20;

// The launcher on another host that started this one. Reads its messages, and says when that launcher counts as lost.
class OtherLauncher {
 public:
  struct Patience {
    double after_break_seconds = 0;  // from when its connection broke to when it can be known whether it lives
    double silence_seconds = kLongSilenceSeconds;  // infinite: its silence does not matter
  };

  // Reads this process's standard input.
  OtherLauncher();

  const Patience& patience() const { return patience_; }
  void set_patience(const Patience& patience) { patience_ = patience; }

  // The first line. Throws ClusterError where none comes.
  std::string first(Deadline deadline);

  // Waits until ranks may be started. Returns false where the job has ended before. Throws ClusterError where no
  // message comes.
  bool wait_for_begin(Deadline deadline);

  // For poll; -1 once the connection is broken.
  int descriptor() const { return is_broken_ ? -1 : 0; }

  struct Message {
    enum class Kind { none, end, leave, signal, lost, silent } kind = Kind::none;
    int signal = 0;
  };

  // The next message. `lost` comes once, `after_break_seconds` after the connection broke. `silent` comes once, unless
  // the ranks are to end anyway.
  Message next();

  // True once that launcher has asked the ranks to end, or has been silent.
  bool ranks_are_to_end() const { return ranks_are_to_end_; }

  // True where nothing has come for `seconds`, or the connection is broken.
  bool is_silent_for(double seconds);

 private:
  void read_some();
  double silence_seconds() const;

  Patience patience_;
  Lines lines_{/*redraws=*/false, kLongestMessage};
  std::deque<std::string> waiting_;
  Deadline::Clock::time_point heard_;
  bool is_broken_ = false, ranks_are_to_end_ = false, was_lost_ = false;
  std::optional<Deadline> lost_at_;
};

// A stream's buffer for what this launcher prints for the other one. A flush writes to a descriptor. Where that takes
// no more, the flush waits while the other launcher, which may read slowly, shows signs of life. Where that launcher
// has been silent for `silent_seconds`, the lines are dropped. The ranks print into this process, and would stop
// otherwise when the network between the launchers breaks.
class PartOutput : public std::stringbuf {
 public:
  PartOutput(int descriptor, OtherLauncher& launcher, double silent_seconds);

 protected:
  int sync() override;

 private:
  const int descriptor_;
  OtherLauncher& launcher_;
  const double silent_seconds_;
  bool in_line_ = false;  // a part of a line was written
  int dropped_ = 0;       // lines
};

}  // namespace lockstep::launch
