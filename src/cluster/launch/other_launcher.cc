#include "cluster/launch/other_launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr int kBetweenTriesMs = 100;
constexpr std::string_view kSignal = "signal ", kRanksEnded = "lockstep part: ended ";

std::optional<int> number_after(std::string_view begin, const std::string& line) {
  if (!line.starts_with(begin)) return std::nullopt;
  return whole_number<int>(std::string_view(line).substr(begin.size()));
}

int signal_in(const std::string& line) {
  const int signal = number_after(kSignal, line).value_or(0);
  return signal > 0 && signal < NSIG ? signal : 0;
}

}  // namespace

std::string signal_message(int signal) { return text(kSignal, signal, "\n"); }
std::string ranks_ended_message(int status) { return text(kRanksEnded, status, "\n"); }
std::optional<int> status_in(const std::string& line) { return number_after(kRanksEnded, line); }

OtherLauncher::OtherLauncher() : heard_(Deadline::Clock::now()) { fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK); }

std::string OtherLauncher::first(Deadline deadline) {
  while (waiting_.empty()) {
    if (is_broken_ || !transport::wait_for_events(STDIN_FILENO, POLLIN, deadline)) {
      throw ClusterError("lockstep run: no other launcher says what to run here");
    }
    read_some();
  }
  auto line = waiting_.front();
  waiting_.pop_front();
  return line;
}

bool OtherLauncher::wait_for_begin(Deadline deadline) {
  auto line = first(deadline);
  while (line + "\n" == kAlive) line = first(deadline);
  return line + "\n" == kBegin;
}

OtherLauncher::Message OtherLauncher::next() {
  using Kind = Message::Kind;
  if (!is_broken_) read_some();
  while (!waiting_.empty()) {
    const int signal = signal_in(waiting_.front());
    const auto message = waiting_.front() + "\n";
    waiting_.pop_front();
    if (message == kLeave) return {Kind::leave};
    ranks_are_to_end_ |= message == kEnd || signal != 0;
    if (message == kEnd) return {Kind::end};
    if (signal != 0) return {Kind::signal, signal};
  }
  if (!is_broken_) {
    if (ranks_are_to_end_ || silence_seconds() < patience_.silence_seconds) return {};
    ranks_are_to_end_ = true;
    return {Kind::silent};
  }
  if (!lost_at_) lost_at_ = Deadline::after(std::chrono::duration<double>(patience_.after_break_seconds));
  return {lost_at_->passed() && !std::exchange(was_lost_, true) ? Kind::lost : Kind::none};
}

bool OtherLauncher::is_silent_for(double seconds) {
  if (!is_broken_) read_some();
  return is_broken_ || silence_seconds() >= seconds;
}

double OtherLauncher::silence_seconds() const {
  return std::chrono::duration<double>(Deadline::Clock::now() - heard_).count();
}

void OtherLauncher::read_some() {
  char bytes[16384];
  const auto count = read(STDIN_FILENO, bytes, sizeof bytes);
  if (count > 0) {
    heard_ = Deadline::Clock::now();
    lines_.add(bytes, static_cast<std::size_t>(count),
               [this](const std::string& line, bool) { waiting_.push_back(line); });
  }
  is_broken_ = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

PartOutput::PartOutput(int descriptor, OtherLauncher& launcher, double silent_seconds)
    : descriptor_(descriptor), launcher_(launcher), silent_seconds_(silent_seconds) {
  fcntl(descriptor, F_SETFL, O_NONBLOCK);
}

int PartOutput::sync() {
  const auto pending = str();
  str({});
  if (dropped_ > 0) {
    const auto lines = text(in_line_ ? "\n" : "", "lockstep: ", dropped_, " lines of this host were dropped\n");
    if (write(descriptor_, lines.data(), lines.size()) == static_cast<ssize_t>(lines.size())) {
      dropped_ = 0;
      in_line_ = false;
    }
  }
  bool writable = dropped_ == 0;
  std::size_t written = 0;
  while (writable && written < pending.size()) {
    const auto count = write(descriptor_, pending.data() + written, pending.size() - written);
    if (count > 0) {
      written += static_cast<std::size_t>(count);
      in_line_ = pending[written - 1] != '\n';
      continue;
    }
    writable = (errno == EAGAIN || errno == EINTR) && !launcher_.is_silent_for(silent_seconds_);
    pollfd poll_for{descriptor_, POLLOUT, 0};
    if (writable) poll(&poll_for, 1, kBetweenTriesMs);
  }
  dropped_ += static_cast<int>(std::count(pending.begin() + static_cast<std::ptrdiff_t>(written), pending.end(), '\n'));
  return 0;
}

}  // namespace lockstep::launch
