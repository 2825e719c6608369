#include "transport/connections.h"

#include <sys/random.h>

#include <algorithm>
#include <array>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/acceptor.h"
#include "transport/socket.h"

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

namespace {

// Makes all connections to a rank, [number].
void connect_to_rank(int rank, const std::string& address, const Access& access, Greeting mine,
                     std::vector<Sockets>& made, Deadline deadline) {
  try {
    for (mine.number = 0; mine.number < made.size(); ++mine.number) {
      auto [socket, theirs, keys] = connect_proved(address, access, mine, deadline);
      if (theirs.rank != rank) throw ClusterError(text("it says that it is rank ", theirs.rank));
      made[mine.number][static_cast<std::size_t>(rank)] = std::move(socket);
    }
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded("connecting to other hosts", error.waited_for(), {rank}, text(" (at ", address, ")"));
  } catch (const ClusterError& error) {
    throw ClusterError(text("rank ", rank, " at ", address, ": ", error.what()));
  }
}

// Takes connections until all higher ranks have come.
void accept_higher(const FileDescriptor& listener, const Access& access, const Greeting& mine,
                   std::vector<Sockets>& made, Deadline deadline) {
  const int size = static_cast<int>(made[0].size());
  const auto place = [&](int rank, std::uint32_t number) -> FileDescriptor& {
    return made[number][static_cast<std::size_t>(rank)];
  };
  const auto is_expected = [&](const Greeting& theirs) {
    return theirs.rank > mine.rank && theirs.rank < size && theirs.number < made.size() &&
           !place(theirs.rank, theirs.number).open();
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = mine.rank + 1; r < size; ++r) {
      const auto open = [r](const Sockets& sockets) { return sockets[static_cast<std::size_t>(r)].open(); };
      if (!std::all_of(made.begin(), made.end(), open)) ranks.push_back(r);
    }
    return ranks;
  };
  Acceptor acceptor(listener, access, mine, [&](const Greeting& theirs) -> std::string {
    return is_expected(theirs) ? "" : text("it says that it is rank ", theirs.rank);
  });
  while (!missing().empty()) {
    try {
      auto [socket, theirs, keys] = acceptor.next(deadline);
      if (is_expected(theirs)) place(theirs.rank, theirs.number) = std::move(socket);
    } catch (const DeadlineExceeded& error) {
      throw DeadlineExceeded("connecting to other hosts", error.waited_for(), missing());
    }
  }
}

}  // namespace

std::vector<Sockets> connect_all(const ChannelOptions& options, int count, const AllGather& all_gather,
                                 Deadline deadline) {
  const auto listener = listen_at_any_port(options.address, options.access);
  const auto all = all_gather(text(random_name(), " ", local_address(listener)));
  constexpr std::size_t kName = 32;
  Greeting mine;
  mine.protocol = {'m', 'e', 's', 's', 'a', 'g', 'e', 's'};
  std::copy_n(all[0].begin(), std::min(kName, all[0].size()), mine.group.begin());
  mine.generation = options.generation;
  mine.rank = options.rank;
  std::vector<Sockets> made(static_cast<std::size_t>(count));
  for (auto& sockets : made) sockets.resize(static_cast<std::size_t>(options.size));
  for (int r = 0; r < options.rank; ++r) {
    connect_to_rank(r, all[static_cast<std::size_t>(r)].substr(kName + 1), options.access, mine, made, deadline);
  }
  accept_higher(listener, options.access, mine, made, deadline);
  return made;
}

}  // namespace lockstep::transport
