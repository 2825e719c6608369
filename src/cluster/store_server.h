// The process that holds a Store: one thread that answers all others.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/file.h"
#include "transport/acceptor.h"
#include "transport/handshake.h"

namespace lockstep::cluster {

// Both ends send this first (transport/handshake.h).
transport::Greeting store_greeting();

// After the greeting both ends send sealed frames (transport/handshake.h): four bytes of a code, and a packed list of
// strings. So nobody who stands between the two can change an address that the store tells.
struct StoreFrame {
  static constexpr std::uint32_t kLongest = 4 << 20;  // of the list

  enum Code : std::uint32_t { set, get, missing, add, compare_set, fail_waiters, set_at_end, done, refused, failed };
  static constexpr std::size_t kLongestSealed = sizeof(Code) + kLongest + transport::Seal::kTag;

  std::uint32_t code = done;
  std::optional<std::vector<std::string>> items = {};  // empty where the rest is no list of strings
};
std::string seal_frame(transport::Seal& seal, std::uint32_t code, const std::string& packed);

// Throws ClusterError where there is no code.
StoreFrame open_frame(transport::Seal& seal, std::string_view sealed);

class StoreServer {
 public:
  // Throws ClusterError when the address cannot be had.
  StoreServer(const std::string& address, Access access);

  // Serves connected clients until they leave, for a second at most.
  ~StoreServer();

  const std::string& address() const { return address_; }

 private:
  struct Client {
    FileDescriptor socket;
    transport::Seal seal;
    std::string in;                                         // bytes of an incomplete request
    std::string out;                                        // bytes that are not sent yet
    std::vector<std::string> awaited;                       // keys that it waits for
    std::vector<std::pair<std::string, std::string>> last;  // keys and values to be set when it has gone
    bool leaving = false;                                   // to be closed once `out` is sent
    bool closed = false;
  };

  struct FailedKeys {  // keys with this prefix and suffix
    std::string prefix, suffix, reason;
  };

  void serve();
  void read(Client& client);
  bool take_next(Client& client);
  void turn_away(Client& client, const std::string& problem);
  void answer(Client& client, std::uint32_t code, const std::vector<std::string>& items);
  void carry_out(Client& client, std::uint32_t code, const std::vector<std::string>& items);
  void answer_waiting();
  void flush(Client& client);
  void remove_closed();
  bool has_all(const std::vector<std::string>& keys) const;
  const std::string* reason_not_to_wait_for(const std::vector<std::string>& keys) const;
  std::vector<std::string> values_of(const std::vector<std::string>& keys) const;

  const Access access_;
  FileDescriptor listener_;
  FileDescriptor stop_;  // an eventfd
  std::string address_;
  std::map<std::string, std::string> values_;     // of the thread
  std::vector<FailedKeys> failures_;              // of the thread
  std::vector<std::unique_ptr<Client>> clients_;  // of the thread
  std::jthread thread_;
};

}  // namespace lockstep::cluster
