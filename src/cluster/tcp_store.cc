#include "cluster/tcp_store.h"

#include "base/text.h"
#include "cluster/resolvers.h"
#include "cluster/store_texts.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

// Its `items` are there.
StoreFrame read_answer(const FileDescriptor& socket, transport::Seal& seal, Deadline deadline) {
  const auto length = transport::read_value<std::uint32_t>(socket, deadline);
  if (length > StoreFrame::kLongestSealed) {
    throw ClusterError(text("an answer of ", length, " bytes is not to be believed"));
  }
  std::string bytes(length, '\0');
  transport::read_all(socket, std::as_writable_bytes(std::span(bytes)), deadline);
  auto answer = open_frame(seal, bytes);
  if (!answer.items) throw ClusterError("an answer that cannot be read");
  const bool has_reason = answer.code == StoreFrame::refused || answer.code == StoreFrame::failed;
  if (has_reason && answer.items->empty()) throw ClusterError("an answer without a reason");
  return answer;
}

}  // namespace

std::shared_ptr<TcpStore> TcpStore::hold(const std::string& address, const Access& access) {
  auto store = std::make_shared<TcpStore>();
  store->access_ = access;
  store->server_.emplace(address, access);
  store->address_ = store->server_->address();
  return store;
}

std::shared_ptr<TcpStore> TcpStore::connect(const std::string& address, Deadline deadline, const Access& access) {
  auto store = std::make_shared<TcpStore>();
  store->access_ = access;
  store->address_ = address;
  store->ask(StoreFrame::missing, {}, deadline);  // does a store answer?
  return store;
}

std::string TcpStore::local_address(Deadline deadline) {
  return transport::address_towards(host_of(address_, "the store's address"), deadline);
}

void TcpStore::set(const std::string& key, const std::string& value, Deadline deadline) {
  ask(StoreFrame::set, {key, value}, deadline);
}

std::vector<std::string> TcpStore::get(const std::vector<std::string>& keys, Deadline deadline) {
  return ask(StoreFrame::get, keys, deadline, static_cast<int>(keys.size()));
}

std::vector<std::string> TcpStore::missing(const std::vector<std::string>& keys, Deadline deadline) {
  return ask(StoreFrame::missing, keys, deadline);
}

std::int64_t TcpStore::add(const std::string& key, std::int64_t difference, Deadline deadline) {
  const auto sum = whole_number(ask(StoreFrame::add, {key, std::to_string(difference)}, deadline, 1)[0]);
  if (!sum) throw ClusterError(text("the store at ", address_, " did not answer with a number"));
  return *sum;
}

std::string TcpStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                                  Deadline deadline) {
  return ask(StoreFrame::compare_set, {key, expected, desired}, deadline, 1)[0];
}

// On a connection of its own, which lasts as long as what is returned.
std::shared_ptr<void> TcpStore::set_at_end(const std::string& key, const std::string& value, Deadline deadline) {
  auto connection = std::make_shared<TcpStore>();
  connection->access_ = access_;
  connection->address_ = address_;
  connection->ask(StoreFrame::set_at_end, {key, value}, deadline);
  return connection;
}

void TcpStore::fail_waiters(const std::string& prefix, const std::string& suffix, const std::string& reason,
                            Deadline deadline) {
  ask(StoreFrame::fail_waiters, {prefix, suffix, reason}, deadline);
}

std::vector<std::string> TcpStore::ask(std::uint32_t code, const std::vector<std::string>& items, Deadline deadline,
                                       int answers) {
  auto link = take_idle();
  if (!link.socket.open()) link = open_link(deadline);
  StoreFrame answer;
  try {
    const auto bytes = seal_frame(link.seal, code, pack(items));
    transport::write_all(link.socket, std::as_bytes(std::span(bytes)), deadline);
    answer = read_answer(link.socket, link.seal, deadline);
    MutexLock lock(mutex_);
    idle_.push_back(std::move(link));
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded(text("the store at ", address_), deadline.waited(), {}, text(" (", error.operation(), ")"));
  } catch (const ClusterError& error) {
    throw ClusterError(text("the store at ", address_, ": ", error.what()));
  }
  auto& strings = *answer.items;
  if (answer.code == StoreFrame::refused) throw ClusterError(text("the store at ", address_, ": ", strings[0]));
  if (answer.code == StoreFrame::failed) throw ClusterError(strings[0]);
  if (answers >= 0 && strings.size() != static_cast<std::size_t>(answers)) {
    throw ClusterError(text("the store at ", address_, " answered with ", strings.size(), " strings, not ", answers));
  }
  return std::move(strings);
}

TcpStore::Link TcpStore::open_link(Deadline deadline) {
  try {
    auto [socket, theirs, keys] = transport::connect_proved(address_, access_, store_greeting(), deadline);
    return {std::move(socket), {keys, transport::End::connects}};
  } catch (const ClusterError& error) {
    throw ClusterError(text("the store at ", address_, ": ", error.what()));
  }
}

// Each call uses a connection of its own, so that calls that wait do not block others.
TcpStore::Link TcpStore::take_idle() {
  MutexLock lock(mutex_);
  if (idle_.empty()) return {};
  auto link = std::move(idle_.back());
  idle_.pop_back();
  return link;
}

}  // namespace lockstep::cluster
