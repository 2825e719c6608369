#include "transport/network_channels.h"

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <set>

#include "base/text.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

// A rank that lives and waits answers within this time.
constexpr std::chrono::milliseconds kForAnswers(300);

}  // namespace

// A message.
//
//   kind 8 | number 8 | failure
struct FailureChannel::Notice {
  enum class Kind : std::uint64_t { failure, goodbye, question, answer };

  Kind kind = Kind::failure;
  std::int64_t number = 0;  // that the sender shows
  Failure failure = {};     // of the kind `failure`
};

FailureChannel::FailureChannel(int rank, std::int64_t generation, double lost_host_seconds,
                               std::vector<FileDescriptor> links)
    : rank_(rank), generation_(generation), wake_up_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (auto& socket : links) {
    if (socket.open()) keep_alive(socket, lost_host_seconds);
    links_.push_back({std::move(socket), {}, false, false, {}});
  }
  MutexLock lock(mutex_);
  told_ = {std::vector<std::int64_t>(links_.size()), std::vector<bool>(links_.size())};
}

FailureChannel::~FailureChannel() { leave(); }

void FailureChannel::leave() {
  for (const auto& link : links_) {
    if (!left_) send_to(link, {Notice::Kind::goodbye});
  }
  left_ = true;
}

bool FailureChannel::alone() const {
  if (failed_.load(std::memory_order_acquire)) return true;
  return std::all_of(links_.begin(), links_.end(),
                     [](const Link& link) { return !link.socket.open() || link.left || link.ended; });
}

bool FailureChannel::is_first(const Failure& failure) {
  MutexLock lock(mutex_);
  if (failure_) return false;
  failure_ = failure;
  failed_.store(true, std::memory_order_release);
  return true;
}

void FailureChannel::fail(const Failure& failure) {
  if (!is_first(failure)) return;
  send(failure);
  eventfd_write(wake_up_.get(), 1);
}

void FailureChannel::send(const Failure& failure) {
  for (const auto& link : links_) send_to(link, {.failure = failure});
}

// Does not block: a link holds some hundred messages, and a rank sends a few.
void FailureChannel::send_to(const Link& link, Notice notice) const {
  notice.number = number_;
  if (link.socket.open()) ::send(link.socket.get(), &notice, sizeof notice, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void FailureChannel::ask() {
  {
    MutexLock lock(mutex_);
    told_.since_asked.assign(links_.size(), false);
  }
  for (const auto& link : links_) send_to(link, {Notice::Kind::question});
}

ShownNumbers::Told FailureChannel::told() {
  keep_told(rank_, number_, /*since_asked=*/true);
  MutexLock lock(mutex_);
  return told_;
}

void FailureChannel::keep_told(int rank, std::optional<std::int64_t> number, bool since_asked) {
  const auto index = static_cast<std::size_t>(rank);
  MutexLock lock(mutex_);
  if (number) told_.numbers[index] = *number;
  if (since_asked) told_.since_asked[index] = true;
}

// Forwards a failure that another rank reported: this rank may leave because of it before the reporter has told
// everybody, and would be blamed itself. Deadlines are not forwarded: each rank reports its own.
void FailureChannel::record(const Failure& failure) {
  if (is_first(failure) && failure.kind != Failure::Kind::deadline) send(failure);
}

std::optional<Failure> FailureChannel::current_failure() {
  MutexLock lock(mutex_);
  return failure_;
}

// A rank that waits for nobody answers another rank's deadline too: silent ranks are blamed.
void FailureChannel::raise() {
  const auto failure = *current_failure();
  if (failure.kind == Failure::Kind::deadline && failure.reporter != rank_ && !gave_up_) {
    find_to_blame({}, failure.seconds, failure.operation.data());
  }
  failure.raise(rank_, generation_);
}

void FailureChannel::wait(std::span<pollfd> channels, std::span<const int> late, Deadline deadline,
                          const char* operation) {
  listen(channels, deadline);
  const auto failure = current_failure();
  if (failure && failure->kind != Failure::Kind::deadline) raise();
  if (failure || deadline.passed()) give_up(late, deadline, operation);
  // No channel reports that a host lost power; the link's keepalive does.
  const auto silent = [](const pollfd& channel) { return channel.revents == 0; };
  if (!std::all_of(channels.begin(), channels.end(), silent)) return;
  for (const int r : late) {
    const auto& link = links_[static_cast<std::size_t>(r)];
    if (link.ended && !link.left) lost(r, operation);
  }
}

void FailureChannel::look(const char* operation, bool also_left) {
  listen({}, Deadline::after(std::chrono::seconds(0)));
  check();
  for (int r = 0; r < size(); ++r) {
    const auto& link = links_[static_cast<std::size_t>(r)];
    if (link.ended && (also_left || !link.left)) lost(r, operation);
  }
}

void FailureChannel::give_up(std::span<const int> late, Deadline deadline, const char* operation) {
  find_to_blame(late, deadline.waited().count(), operation);
}

// Tells the others whom this rank waits for, receives their messages, and blames the awaited ranks that are silent.
void FailureChannel::find_to_blame(std::span<const int> late, double seconds, const char* operation) {
  const auto mine = Failure::deadline(rank_, {late.begin(), late.end()}, seconds, operation);
  record(mine);
  send(mine);
  gave_up_ = true;
  const auto silent = [this](int r) {
    const auto& link = links_[static_cast<std::size_t>(r)];
    return r != rank_ && !link.last_error && !link.ended;
  };
  const auto any_silent = [&] {
    for (int r = 0; r < size(); ++r) {
      if (silent(r)) return true;
    }
    return false;
  };
  const auto answers = Deadline::after(kForAnswers);
  while (any_silent() && !answers.passed()) listen({}, answers);

  std::set<int> waited_for(late.begin(), late.end()), blamed;
  for (const auto& link : links_) {
    if (!link.last_error || link.last_error->kind != Failure::Kind::deadline) continue;
    for (const int r : link.last_error->blamed()) waited_for.insert(r);
  }
  std::copy_if(waited_for.begin(), waited_for.end(), std::inserter(blamed, blamed.end()), silent);
  const auto& named = blamed.empty() ? waited_for : blamed;
  const auto found = Failure::deadline(rank_, {named.begin(), named.end()}, seconds, operation);
  {
    MutexLock lock(mutex_);
    if (failure_->kind == Failure::Kind::deadline) failure_ = found;  // for whoever calls after this
  }
  found.raise(rank_, generation_);
}

void FailureChannel::lost(int rank, const char* operation) {
  const auto until = Deadline::after(kForAnswers);
  while (!failed_.load(std::memory_order_acquire) && !gone(rank) && !until.passed()) listen({}, until);
  check();
  const auto& link = links_[static_cast<std::size_t>(rank)];
  fail(Failure::peer_lost(
      rank_, rank, text(link.left ? "it left the group" : "its process or its host went away", " during ", operation)));
  raise();
}

void FailureChannel::listen(std::span<pollfd> channels, Deadline deadline) {
  std::vector<pollfd> polls(channels.begin(), channels.end());
  polls.push_back({wake_up_.get(), POLLIN, 0});
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    const auto& link = links_[static_cast<std::size_t>(r)];
    if (!link.socket.open() || link.ended) continue;
    polls.push_back({link.socket.get(), POLLIN, 0});
    ranks.push_back(r);
  }
  poll(polls.data(), polls.size(), milliseconds_to(deadline));
  for (std::size_t i = 0; i < channels.size(); ++i) channels[i].revents = polls[i].revents;
  eventfd_t rings = 0;
  eventfd_read(wake_up_.get(), &rings);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (polls[channels.size() + 1 + i].revents != 0) receive(ranks[i]);
  }
}

void FailureChannel::receive(int rank) {
  auto& link = links_[static_cast<std::size_t>(rank)];
  std::byte bytes[sizeof(Notice)];
  while (true) {
    const auto count = recv(link.socket.get(), bytes, sizeof bytes - link.partial_notice.size(), MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) {
      link.ended = true;
      return keep_told(rank, std::nullopt, /*since_asked=*/true);
    }
    link.partial_notice.insert(link.partial_notice.end(), bytes, bytes + count);
    if (link.partial_notice.size() < sizeof(Notice)) continue;
    Notice notice;
    std::memcpy(&notice, link.partial_notice.data(), sizeof notice);
    link.partial_notice.clear();
    take(rank, notice);
  }
}

void FailureChannel::take(int rank, const Notice& notice) {
  auto& link = links_[static_cast<std::size_t>(rank)];
  keep_told(rank, notice.number, /*since_asked=*/notice.kind == Notice::Kind::answer);
  switch (notice.kind) {
    case Notice::Kind::question: return send_to(link, {Notice::Kind::answer});
    case Notice::Kind::goodbye: link.left = true; break;
    case Notice::Kind::failure: {
      const auto failure = notice.failure.checked(size());
      link.last_error = failure;
      record(failure);
      break;
    }
    default: break;
  }
}

}  // namespace lockstep::transport
