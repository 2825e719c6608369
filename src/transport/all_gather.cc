#include "transport/all_gather.h"

#include <sys/random.h>

#include <array>

#include "lockstep/base/error.h"

namespace lockstep::transport {

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw ClusterError("the system has no random numbers");
  }
  std::string name;
  for (const auto byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

}  // namespace lockstep::transport
