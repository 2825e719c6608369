#include "transport/acceptor.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

// A process of the job that gets a core completes the handshake in milliseconds. A handshake may take kToProve, and
// only kToBelong where other connections wait for its slot.
constexpr std::chrono::seconds kToProve(30), kToBelong(2);
constexpr std::chrono::milliseconds kToOpen(100);

void warn(const std::string& problem) {
  static RepeatedWarning warning;
  warning.log(text("turned a connection away: ", problem));
}

bool one_waits_at(const FileDescriptor& listener) {
  pollfd polled{listener.get(), POLLIN, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace

std::size_t most_that_prove() {
  constexpr rlim_t kMost = 256;
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? std::max<rlim_t>(1, std::min(kMost, limit.rlim_cur / 8)) : kMost;
}

Acceptor::Acceptor(const FileDescriptor& listener, Access access, const Greeting& who, Refuse refuse, Bound bound)
    : listener_(listener),
      access_(std::move(access)),
      who_(who),
      refuse_(std::move(refuse)),
      bound_(bound),
      most_(most_that_prove()) {}

void Acceptor::watch(std::vector<pollfd>& polls) const {
  const bool full = no_descriptors_ || proving_.size() >= most_;
  polls.push_back({full ? -1 : listener_.get(), POLLIN, 0});
  for (const auto& end : proving_) polls.push_back({end->socket().get(), POLLIN, 0});
}

std::vector<Connection> Acceptor::advance(std::span<const pollfd> polled) {
  std::vector<Connection> accepted;
  const Refuse refuse = [this](const Greeting& theirs) { return this->refuse(theirs); };
  for (std::size_t i = 0; i < proving_.size(); ++i) {
    auto& end = proving_[i];
    try {
      if (polled[i + 1].revents != 0 && end->advance(access_, who_, refuse)) {
        accepted.push_back({end->take_socket(), end->theirs(), end->keys(access_)});
        end.reset();
      } else if (end->age() > kToProve) {
        throw ClusterError("it did not prove in time that it belongs to this job");
      }
    } catch (const Error& error) {
      if (end->has_sent()) warn(error.what());  // else somebody only asked whether anybody answers here
      end.reset();
    }
  }
  std::erase(proving_, nullptr);
  no_descriptors_ = false;
  take_new();
  return accepted;
}

// The reason for which an end is refused whose opening is true; empty where it is not. Without a token anybody can make
// openings, so they are not kept.
std::string Acceptor::refuse(const Greeting& theirs) {
  if (!access_.token.empty() && !opened_.insert(theirs.random).second) return "its opening was used before";
  return refuse_(theirs);
}

// Turns a connection away only where all places are taken and another connection waits for one.
void Acceptor::take_new() {
  while (proving_.size() < most_ || (one_waits_at(listener_) && make_room())) {
    FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.open()) {
      no_descriptors_ = errno == EMFILE || errno == ENFILE;
      return;
    }
    send_at_once(socket);
    proving_.push_back(std::make_unique<AcceptingEnd>(std::move(socket), bound_));
  }
}

// Drops a connection that has exceeded its time: the oldest without an opening, else the oldest that is slow. False
// where there is none.
bool Acceptor::make_room() {
  const auto silent = [](const auto& end) { return end->age() > kToOpen && !end->has_opened(); };
  const auto slow = [](const auto& end) { return end->age() > kToBelong; };
  auto last = std::find_if(proving_.begin(), proving_.end(), silent);
  if (last == proving_.end()) last = std::find_if(proving_.begin(), proving_.end(), slow);
  if (last == proving_.end()) return false;
  proving_.erase(last);
  warn(text("more than ", most_, " at a time have not proved that they belong to this job"));
  return true;
}

Connection Acceptor::next(Deadline deadline) {
  while (accepted_.empty()) {
    if (deadline.passed()) throw DeadlineExceeded("accepting a connection", deadline.waited());
    std::vector<pollfd> polls;
    watch(polls);
    poll(polls.data(), polls.size(), std::min(milliseconds_to(deadline), kLongestPoll));
    accepted_ = advance(polls);
  }
  auto first = std::move(accepted_.front());
  accepted_.erase(accepted_.begin());
  return first;
}

}  // namespace lockstep::transport
