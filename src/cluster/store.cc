#include "lockstep/cluster/store.h"

#include <algorithm>
#include <optional>

#include "base/mutex.h"
#include "base/text.h"
#include "cluster/store_server.h"
#include "cluster/strings.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep {
namespace {

constexpr std::size_t kLongestItem = 1 << 20;
// Extra time after a call's deadline in which the store may say which keys are missing.
constexpr std::chrono::seconds kExtraForReason(1);

}  // namespace

struct Store::State {
  // `answers`: how many strings are to come back; -1: any number.
  std::vector<std::string> ask(std::uint32_t code, const std::vector<std::string>& items, Deadline deadline,
                               int answers = -1);
  FileDescriptor take_idle();  // closed where there is none

  std::optional<cluster::StoreServer> server;  // where this process holds the store
  std::string address;
  Access access;
  Mutex mutex;
  std::vector<FileDescriptor> idle LOCKSTEP_GUARDED_BY(mutex);  // connections without a request in flight
};

namespace {

struct Answer {
  std::uint32_t code = cluster::StoreFrame::done;
  std::vector<std::string> items;
};

Answer read_answer(const FileDescriptor& socket, Deadline deadline) {
  const auto frame = transport::read_value<cluster::StoreFrame>(socket, deadline);
  if (frame.length > cluster::StoreFrame::kLongest) {
    throw ClusterError(text("an answer of ", frame.length, " bytes is not to be believed"));
  }
  std::string bytes(frame.length, '\0');
  transport::read_all(socket, std::as_writable_bytes(std::span(bytes)), deadline);
  auto items = cluster::unpack(bytes);
  if (!items) throw ClusterError("an answer that cannot be read");
  const bool has_reason = frame.code == cluster::StoreFrame::refused || frame.code == cluster::StoreFrame::failed;
  if (has_reason && items->empty()) throw ClusterError("an answer without a reason");
  return {frame.code, std::move(*items)};
}

}  // namespace

Store Store::hold(const std::string& address, const Access& access) {
  auto state = std::make_shared<State>();
  state->access = access;
  state->server.emplace(address, access);
  state->address = state->server->address();
  return Store(std::move(state));
}

Store Store::connect(const std::string& address, Deadline deadline, const Access& access) {
  auto state = std::make_shared<State>();
  state->access = access;
  state->address = address;
  state->ask(cluster::StoreFrame::missing, {}, deadline);  // does a store answer?
  return Store(std::move(state));
}

std::string Store::address() const { return state_->address; }
const Access& Store::access() const { return state_->access; }
Store Store::prefixed(const std::string& prefix) const { return Store(state_, prefix_ + prefix); }
Store Store::without_prefix() const { return Store(state_); }

void Store::set(const std::string& key, const std::string& value, Deadline deadline) const {
  state_->ask(cluster::StoreFrame::set, {prefix_ + key, value}, deadline);
}

std::string Store::get(const std::string& key, Deadline deadline) const { return get(std::vector{key}, deadline)[0]; }

std::int64_t Store::add(const std::string& key, std::int64_t difference, Deadline deadline) const {
  const auto sum =
      whole_number(state_->ask(cluster::StoreFrame::add, {prefix_ + key, std::to_string(difference)}, deadline, 1)[0]);
  if (!sum) throw ClusterError(text("the store at ", address(), " did not answer with a number"));
  return *sum;
}

std::string Store::compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                               Deadline deadline) const {
  return state_->ask(cluster::StoreFrame::compare_set, {prefix_ + key, expected, desired}, deadline, 1)[0];
}

// On a connection of its own, which lasts as long as what is returned.
std::shared_ptr<void> Store::set_at_end(const std::string& key, const std::string& value, Deadline deadline) const {
  auto state = std::make_shared<State>();
  state->access = access();
  state->address = address();
  state->ask(cluster::StoreFrame::set_at_end, {prefix_ + key, value}, deadline);
  return state;
}

void Store::fail_waiters(const std::string& prefix, const std::string& reason, Deadline deadline,
                         const std::string& suffix) const {
  state_->ask(cluster::StoreFrame::fail_waiters, {prefix_ + prefix, suffix, reason}, deadline);
}

std::vector<std::string> Store::get(const std::vector<std::string>& keys, Deadline deadline) const {
  if (keys.empty()) return {};
  std::vector<std::string> whole;
  for (const auto& key : keys) whole.push_back(prefix_ + key);
  try {
    return state_->ask(cluster::StoreFrame::get, whole, deadline, static_cast<int>(whole.size()));
  } catch (const DeadlineExceeded&) {
    const auto missing = state_->ask(cluster::StoreFrame::missing, whole, Deadline::after(kExtraForReason));
    std::vector<int> places;
    for (const auto& key : missing) {
      places.push_back(static_cast<int>(std::find(whole.begin(), whole.end(), key) - whole.begin()));
    }
    throw DeadlineExceeded("store", deadline.waited(), places,
                           text(" (missing in ", address(), ": ", join(missing), ")"));
  }
}

std::vector<std::string> Store::State::ask(std::uint32_t code, const std::vector<std::string>& items, Deadline deadline,
                                           int answers) {
  for (const auto& item : items) {
    if (item.size() <= kLongestItem) continue;
    throw InvalidArgument(text("store: a key or value of ", item.size(), " bytes; at most ", kLongestItem));
  }
  auto socket = take_idle();
  const bool known = socket.open();
  if (!known) socket = transport::connect_to(address, deadline);
  Answer answer;
  try {
    if (!known) transport::introduce(socket, access, cluster::store_greeting(), deadline);
    const auto bytes = cluster::pack(items);
    transport::write_value(
        socket, cluster::StoreFrame{.code = code, .length = static_cast<std::uint32_t>(bytes.size())}, deadline);
    transport::write_all(socket, std::as_bytes(std::span(bytes)), deadline);
    answer = read_answer(socket, deadline);
    MutexLock lock(mutex);
    idle.push_back(std::move(socket));
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded(text("the store at ", address), deadline.waited(), {}, text(" (", error.operation(), ")"));
  } catch (const ClusterError& error) {
    throw ClusterError(text("the store at ", address, ": ", error.what()));
  }
  if (answer.code == cluster::StoreFrame::refused)
    throw ClusterError(text("the store at ", address, ": ", answer.items[0]));
  if (answer.code == cluster::StoreFrame::failed) throw ClusterError(answer.items[0]);
  if (answers >= 0 && answer.items.size() != static_cast<std::size_t>(answers)) {
    throw ClusterError(
        text("the store at ", address, " answered with ", answer.items.size(), " strings, not ", answers));
  }
  return std::move(answer.items);
}

// Each call uses a connection of its own, so that calls that wait do not block others.
FileDescriptor Store::State::take_idle() {
  MutexLock lock(mutex);
  if (idle.empty()) return {};
  auto socket = std::move(idle.back());
  idle.pop_back();
  return socket;
}

}  // namespace lockstep
