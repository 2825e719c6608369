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

std::array<char, 32> group_named(const std::string& name) {
  std::array<char, 32> group{};
  std::copy_n(name.begin(), std::min(name.size(), group.size()), group.begin());
  return group;
}

class ConnectionSetup {
 public:
  ConnectionSetup(const ChannelOptions& options, int count, const std::string& group, Deadline deadline)
      : options_(options), deadline_(deadline), made_(static_cast<std::size_t>(count)) {
    mine_.protocol = {'m', 'e', 's', 's', 'a', 'g', 'e', 's'};
    mine_.group = group_named(group);
    mine_.generation = options.generation;
    mine_.rank = options.rank;
    for (auto& sockets : made_) sockets.resize(static_cast<std::size_t>(options.size));
  }

  void connect(int rank, const std::string& address) {
    try {
      for (std::uint32_t number = 0; number < made_.size(); ++number) {
        auto greeting = mine_;
        greeting.number = number;
        auto [socket, theirs, keys] = connect_proved(address, options_.access, greeting, deadline_);
        if (theirs.rank != rank) throw ClusterError(text("it says that it is rank ", theirs.rank));
        place(rank, number) = std::move(socket);
      }
    } catch (const DeadlineExceeded& error) {
      throw DeadlineExceeded("connecting to other hosts", error.waited_for(), {rank}, text(" (at ", address, ")"));
    } catch (const ClusterError& error) {
      throw ClusterError(text("rank ", rank, " at ", address, ": ", error.what()));
    }
  }

  // Takes connections until all higher ranks have come.
  void accept(const FileDescriptor& listener) {
    const auto is_expected = [this](const Greeting& greeting) {
      return greeting.rank > options_.rank && greeting.rank < options_.size && greeting.number < made_.size() &&
             !place(greeting.rank, greeting.number).open();
    };
    Acceptor acceptor(listener, options_.access, mine_, [&](const Greeting& greeting) -> std::string {
      return is_expected(greeting) ? "" : text("it says that it is rank ", greeting.rank);
    });
    while (!missing().empty()) {
      try {
        auto [socket, greeting, keys] = acceptor.next(deadline_);
        if (is_expected(greeting)) place(greeting.rank, greeting.number) = std::move(socket);
      } catch (const DeadlineExceeded& error) {
        throw DeadlineExceeded("connecting to other hosts", error.waited_for(), missing());
      }
    }
  }

  std::vector<Sockets> take() { return std::move(made_); }

 private:
  FileDescriptor& place(int rank, std::uint32_t number) { return made_[number][static_cast<std::size_t>(rank)]; }

  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int r = options_.rank + 1; r < options_.size; ++r) {
      const auto open = [r](const Sockets& sockets) { return sockets[static_cast<std::size_t>(r)].open(); };
      if (!std::all_of(made_.begin(), made_.end(), open)) ranks.push_back(r);
    }
    return ranks;
  }

  const ChannelOptions options_;
  const Deadline deadline_;
  Greeting mine_;
  std::vector<Sockets> made_;
};

}  // namespace

std::vector<Sockets> connect_all(const ChannelOptions& options, int count, const AllGather& all_gather,
                                 Deadline deadline) {
  const auto listener = listen_at_any_port(options.address, options.access);
  const auto all = all_gather(text(random_name(), " ", local_address(listener)));
  constexpr std::size_t kName = 32;
  ConnectionSetup setup(options, count, all[0].substr(0, kName), deadline);
  for (int r = 0; r < options.rank; ++r) setup.connect(r, all[static_cast<std::size_t>(r)].substr(kName + 1));
  setup.accept(listener);
  return setup.take();
}

}  // namespace lockstep::transport
