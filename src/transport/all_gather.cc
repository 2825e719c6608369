#include "transport/all_gather.h"

#include <sys/random.h>

#include <array>

#include "lockstep/base/error.h"

namespace lockstep::transport {

std::string hexadecimal(std::string_view bytes) {
  std::string digits;
  for (const char byte : bytes) {
    digits += "0123456789abcdef"[(byte >> 4) & 15];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

std::string random_name() {
  std::array<char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw ClusterError("the system has no random numbers");
  }
  return hexadecimal({bytes.data(), bytes.size()});
}

}  // namespace lockstep::transport
