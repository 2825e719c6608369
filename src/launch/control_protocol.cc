#include "launch/control_protocol.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

// The other launcher sends a sign of life every second. The limit is long because it may be stopped for a while; the
// end of its connection is noticed without it.
constexpr std::chrono::seconds kLongSilence(300);
constexpr std::string_view kSignal = "signal ";

int signal_in(const std::string& line) {
  int signal = 0;
  if (!line.starts_with(kSignal)) return 0;
  std::from_chars(line.data() + kSignal.size(), line.data() + line.size(), signal);
  return signal > 0 && signal < NSIG ? signal : 0;
}

}  // namespace

std::string signal_message(int signal) { return text(kSignal, signal, "\n"); }

ControlProtocol::ControlProtocol() : silence_(Deadline::after(kLongSilence)) {
  fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
}

std::string ControlProtocol::first(Deadline deadline) {
  while (waiting_.empty()) {
    if (ended_ || !transport::wait_for_events(STDIN_FILENO, POLLIN, deadline)) {
      throw ClusterError("lockstep run: no other launcher says what to run here");
    }
    read_some();
  }
  auto line = waiting_.front();
  waiting_.pop_front();
  return line;
}

ControlProtocol::Message ControlProtocol::next() {
  if (ended_) return {};
  read_some();
  while (!waiting_.empty()) {
    const auto line = waiting_.front() + "\n";
    waiting_.pop_front();
    if (line == kEnd) return {Message::Kind::end};
    const int signal = signal_in(line);
    if (signal != 0) return {Message::Kind::signal, signal};
  }
  if (!ended_ && !silence_.passed()) return {};
  if (!ended_) log_warning(text("the launcher of this job has been silent for ", kLongSilence.count(), " s"));
  ended_ = true;
  return {Message::Kind::launcher_lost};
}

void ControlProtocol::read_some() {
  char bytes[16384];
  const auto count = read(STDIN_FILENO, bytes, sizeof bytes);
  if (count > 0) {
    silence_ = Deadline::after(kLongSilence);
    lines_.add(bytes, static_cast<std::size_t>(count),
               [this](const std::string& line, bool) { waiting_.push_back(line); });
  }
  ended_ = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace lockstep::launch
