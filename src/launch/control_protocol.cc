#include "launch/control_protocol.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::string_view kSignal = "signal ", kRanksEnded = "lockstep part: ended ";

std::optional<int> number_behind(std::string_view begin, const std::string& line) {
  if (!line.starts_with(begin)) return std::nullopt;
  int number = 0;
  const auto* const end = line.data() + line.size();
  const auto [stopped, error] = std::from_chars(line.data() + begin.size(), end, number);
  return error == std::errc() && stopped == end ? std::optional(number) : std::nullopt;
}

int signal_in(const std::string& line) {
  const int signal = number_behind(kSignal, line).value_or(0);
  return signal > 0 && signal < NSIG ? signal : 0;
}

}  // namespace

std::string signal_message(int signal) { return text(kSignal, signal, "\n"); }
std::string ranks_ended_message(int status) { return text(kRanksEnded, status, "\n"); }
std::optional<int> status_in(const std::string& line) { return number_behind(kRanksEnded, line); }

ControlProtocol::ControlProtocol() : heard_(Deadline::Clock::now()) { fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK); }

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

void ControlProtocol::wait_for_begin(Deadline deadline) {
  auto line = first(deadline);
  while (line + "\n" == kAlive) line = first(deadline);
  if (line + "\n" != kBegin) throw ClusterError("lockstep run: the job ended before it began here");
}

ControlProtocol::Message ControlProtocol::next() {
  using Kind = Message::Kind;
  if (!ended_) read_some();
  while (!waiting_.empty()) {
    const auto line = waiting_.front() + "\n";
    waiting_.pop_front();
    if (line == kEnd) return {Kind::end};
    if (line == kLeave) return {Kind::leave};
    const int signal = signal_in(line);
    if (signal != 0) return {Kind::signal, signal};
  }
  return {ended_ && !std::exchange(told_end_, true) ? Kind::launcher_lost : Kind::none};
}

bool ControlProtocol::silent_for(double seconds) {
  if (!ended_) read_some();
  return ended_ || std::chrono::duration<double>(Deadline::Clock::now() - heard_).count() >= seconds;
}

void ControlProtocol::read_some() {
  char bytes[16384];
  const auto count = read(STDIN_FILENO, bytes, sizeof bytes);
  if (count > 0) {
    heard_ = Deadline::Clock::now();
    lines_.add(bytes, static_cast<std::size_t>(count),
               [this](const std::string& line, bool) { waiting_.push_back(line); });
  }
  ended_ = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace lockstep::launch
