// Connections between all ranks of a group, and how ranks exchange texts before they are connected.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "lockstep/base/deadline.h"
#include "lockstep/transport/access.h"
#include "transport/signal.h"

namespace lockstep::transport {

// Tells every rank's text to every rank, in the order of ranks.
using AllGather = std::function<std::vector<std::string>(const std::string& mine)>;

// The bytes in hexadecimal digits.
std::string hexadecimal(std::string_view bytes);

// 128 random bits in hexadecimal, so that nobody can guess the name.
std::string random_name();

// How the ranks of a group connect; equal in meaning on all of them.
struct ChannelOptions {
  int rank = 0;
  int size = 1;
  std::int64_t generation = 0;
  std::string address = "127.0.0.1";  // where this rank listens
  Access access;
  SpinThenBlock spin;
  double lost_host_seconds = kLostHostSeconds;  // after which a host that does not answer is lost
};

// Connected sockets to the other ranks: [rank]; closed for one's own.
using Sockets = std::vector<FileDescriptor>;

// Makes `count` connections between each two ranks: [0 to count - 1][rank]. Collective. Bytes that are not ours,
// and those of another version, job or group, are turned away. Throws DeadlineExceeded naming the ranks that did not
// come.
std::vector<Sockets> connect_all(const ChannelOptions& options, int count, const AllGather& all_gather,
                                 Deadline deadline);

}  // namespace lockstep::transport
