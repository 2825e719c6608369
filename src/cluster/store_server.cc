#include "cluster/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/log.h"
#include "base/text.h"
#include "cluster/store_texts.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

constexpr std::chrono::seconds kToLetGo(1);

}  // namespace

transport::Greeting store_greeting() { return {.protocol = {'s', 't', 'o', 'r', 'e'}}; }

std::string seal_frame(transport::Seal& seal, std::uint32_t code, const std::string& packed) {
  return seal.close(std::string(reinterpret_cast<const char*>(&code), sizeof code) + packed);
}

StoreFrame open_frame(transport::Seal& seal, std::string_view sealed) {
  const auto message = seal.open(sealed);
  StoreFrame frame;
  if (message.size() < sizeof frame.code) throw ClusterError("a message without a code");
  std::memcpy(&frame.code, message.data(), sizeof frame.code);
  frame.items = unpack(std::string_view(message).substr(sizeof frame.code));
  return frame;
}

StoreServer::StoreServer(const std::string& address, Access access)
    : access_(std::move(access)),
      listener_(transport::listen_at(address, access_)),
      stop_(eventfd(0, EFD_CLOEXEC)),
      address_(transport::local_address(listener_)) {
  thread_ = std::jthread([this] { serve(); });
}

StoreServer::~StoreServer() { eventfd_write(stop_.get(), 1); }

void StoreServer::serve() {
  transport::Acceptor acceptor(
      listener_, access_, store_greeting(), [](const transport::Greeting&) { return ""; }, transport::Bound::to_port);
  std::optional<Deadline> last;  // once the store is to end
  while (!last || !(clients_.empty() || last->passed())) {
    std::vector<pollfd> polls{{last ? -1 : stop_.get(), POLLIN, 0}};
    for (const auto& client : clients_) {
      const short out = client->out.empty() ? 0 : POLLOUT;
      polls.push_back({client->socket.get(), static_cast<short>(POLLIN | out), 0});
    }
    const auto members = polls.size();
    acceptor.watch(polls);
    poll(polls.data(), polls.size(), last || acceptor.busy() ? transport::Acceptor::kLongestPoll : -1);
    if (polls[0].revents != 0) last = Deadline::after(kToLetGo);
    for (std::size_t i = 0; i < clients_.size(); ++i) {
      if (polls[i + 1].revents & (POLLIN | POLLHUP | POLLERR)) read(*clients_[i]);
    }
    answer_waiting();
    for (auto& client : clients_) flush(*client);
    remove_closed();
    for (auto& accepted : acceptor.advance(std::span(polls).subspan(members))) {
      clients_.push_back(
          std::make_unique<Client>(Client{std::move(accepted.socket), {accepted.keys, transport::End::accepts}}));
    }
  }
}

// Removes clients that have closed, and sets the values that they left for their end, for which others may wait.
void StoreServer::remove_closed() {
  bool sets = false;
  for (const auto& client : clients_) {
    if (!client->closed) continue;
    for (const auto& [key, value] : client->last) sets |= values_.try_emplace(key, value).second;
  }
  std::erase_if(clients_, [](const auto& client) { return client->closed; });
  if (!sets) return;
  answer_waiting();
  for (auto& client : clients_) flush(*client);
}

void StoreServer::read(Client& client) {
  std::array<char, 65536> bytes;
  const auto count = recv(client.socket.get(), bytes.data(), bytes.size(), 0);
  if (count <= 0) {
    client.closed = count == 0 || (errno != EAGAIN && errno != EINTR);
    return;
  }
  client.in.append(bytes.data(), static_cast<std::size_t>(count));
  while (!client.closed && !client.leaving && take_next(client)) {
  }
}

// Handles the next request; false where it has not arrived completely.
bool StoreServer::take_next(Client& client) {
  std::uint32_t length = 0;
  if (client.in.size() < sizeof length) return false;
  std::memcpy(&length, client.in.data(), sizeof length);
  if (length > StoreFrame::kLongestSealed) {
    turn_away(client, text("a request of ", length, " bytes"));
    return false;
  }
  if (client.in.size() < sizeof length + length) return false;
  try {
    const auto frame = open_frame(client.seal, std::string_view(client.in).substr(sizeof length, length));
    client.in.erase(0, sizeof length + length);
    if (frame.items) {
      carry_out(client, frame.code, *frame.items);
    } else {
      answer(client, StoreFrame::refused, {"the request is not a list of strings"});
    }
    return true;
  } catch (const ClusterError& error) {
    turn_away(client, error.what());
    return false;
  }
}

void StoreServer::turn_away(Client& client, const std::string& problem) {
  log_warning(text("store at ", address_, ": turned a connection away: ", problem));
  client.leaving = true;
  client.out.clear();  // answers to a client that does not read would pile up
}

void StoreServer::carry_out(Client& client, std::uint32_t code, const std::vector<std::string>& items) {
  if (code == StoreFrame::set && items.size() == 2) {
    values_[items[0]] = items[1];
    return answer(client, StoreFrame::done, {});
  }
  if (code == StoreFrame::add && items.size() == 2) {
    const auto found = values_.find(items[0]);
    const auto number = found == values_.end() ? std::optional<std::int64_t>(0) : whole_number(found->second);
    const auto difference = whole_number(items[1]);
    std::int64_t sum = 0;
    if (!number || !difference || __builtin_add_overflow(*number, *difference, &sum)) {
      return answer(client, StoreFrame::refused,
                    {text("cannot add \"", items[1].substr(0, 20), "\" to \"", items[0],
                          "\": no number, or the sum does not fit")});
    }
    return answer(client, StoreFrame::done, {values_[items[0]] = std::to_string(sum)});
  }
  if (code == StoreFrame::compare_set && items.size() == 3) {
    const auto found = values_.find(items[0]);
    if (found == values_.end() && items[2].empty()) return answer(client, StoreFrame::done, {""});
    const auto& value = found == values_.end() ? std::string() : found->second;
    return answer(client, StoreFrame::done, {value == items[1] ? values_[items[0]] = items[2] : value});
  }
  if (code == StoreFrame::fail_waiters && items.size() == 3) {
    failures_.push_back({items[0], items[1], items[2]});
    return answer(client, StoreFrame::done, {});
  }
  if (code == StoreFrame::set_at_end && items.size() == 2) {
    client.last.emplace_back(items[0], items[1]);
    return answer(client, StoreFrame::done, {});
  }
  if (code == StoreFrame::get && !items.empty()) {
    client.awaited = items;
    return;
  }
  if (code == StoreFrame::missing) {
    client.awaited.clear();  // it gave up waiting
    std::vector<std::string> missing;
    for (const auto& key : items) {
      if (!values_.contains(key)) missing.push_back(key);
    }
    return answer(client, StoreFrame::done, missing);
  }
  answer(client, StoreFrame::refused, {text("there is no operation ", code, " of ", items.size(), " strings")});
}

void StoreServer::answer_waiting() {
  for (auto& client : clients_) {
    if (client->awaited.empty()) continue;
    if (has_all(client->awaited)) {
      answer(*client, StoreFrame::done, values_of(client->awaited));
    } else if (const auto* reason = reason_not_to_wait_for(client->awaited)) {
      answer(*client, StoreFrame::failed, {*reason});
    } else {
      continue;
    }
    client->awaited.clear();
  }
}

void StoreServer::answer(Client& client, std::uint32_t code, const std::vector<std::string>& items) {
  const auto bytes = pack(items);
  if (bytes.size() > StoreFrame::kLongest) {
    return answer(client, StoreFrame::refused,
                  {text("an answer of ", bytes.size(), " bytes; one call gets at most ", StoreFrame::kLongest)});
  }
  client.out += seal_frame(client.seal, code, bytes);
}

void StoreServer::flush(Client& client) {
  while (!client.out.empty() && !client.closed) {
    const auto count = send(client.socket.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
    if (count < 0) {
      client.closed = errno != EAGAIN && errno != EINTR;
      return;
    }
    client.out.erase(0, static_cast<std::size_t>(count));
  }
  client.closed |= client.leaving;
}

bool StoreServer::has_all(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [this](const auto& key) { return values_.contains(key); });
}

const std::string* StoreServer::reason_not_to_wait_for(const std::vector<std::string>& keys) const {
  for (const auto& key : keys) {
    if (values_.contains(key)) continue;
    for (const auto& [prefix, suffix, reason] : failures_) {
      if (key.starts_with(prefix) && key.ends_with(suffix)) return &reason;
    }
  }
  return nullptr;
}

std::vector<std::string> StoreServer::values_of(const std::vector<std::string>& keys) const {
  std::vector<std::string> values;
  for (const auto& key : keys) values.push_back(values_.at(key));
  return values;
}

}  // namespace lockstep::cluster
