// The process that holds a Store: one thread that answers all others.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "transport/file_descriptor.h"

namespace lockstep {

// What goes over a connection, both ways, in the order of these fields; then `length` bytes, a packed list of strings.
//
//   magic "LKST" | version | operation or status | length
struct StoreFrame {
  static constexpr std::uint32_t kMagic = 0x54534b4c;
  static constexpr std::uint16_t kVersion = 1;
  static constexpr std::uint32_t kLongest = 4 << 20;
  enum Code : std::uint16_t { set, get, missing, add, compare_set, abandon, done, refused, abandoned };

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t code = done;
  std::uint32_t length = 0;
};
static_assert(sizeof(StoreFrame) == 12);

class StoreServer {
 public:
  // Throws ClusterError when the address cannot be had.
  explicit StoreServer(const std::string& address);

  // Serves those who are there for a little longer.
  ~StoreServer();

  const std::string& address() const { return address_; }

 private:
  struct Client {
    FileDescriptor socket;
    std::string in;                    // bytes of a request that has not come whole
    std::string out;                   // bytes that the other side has not taken
    std::vector<std::string> awaited;  // keys that it waits for
    bool closed = false;
  };

  void serve();
  void read(Client& client);
  void answer(Client& client, std::uint16_t code, const std::vector<std::string>& items);
  void carry_out(Client& client, std::uint16_t code, const std::vector<std::string>& items);
  void answer_waiting();
  void flush(Client& client);
  bool has_all(const std::vector<std::string>& keys) const;
  const std::string* reason_not_to_wait_for(const std::vector<std::string>& keys) const;
  std::vector<std::string> values_of(const std::vector<std::string>& keys) const;

  FileDescriptor listener_;
  FileDescriptor stop_;  // an eventfd
  std::string address_;
  std::map<std::string, std::string> values_;     // of the thread
  std::map<std::string, std::string> abandoned_;  // of the thread: prefix -> reason
  std::vector<std::unique_ptr<Client>> clients_;  // of the thread
  std::jthread thread_;
};

}  // namespace lockstep
