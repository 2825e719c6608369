#include "transport/connections.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/error.h"
#include "transport/socket.h"

namespace lockstep {
namespace {

// The first bytes of a connection, from the rank that made it; the other answers with its own.
//
//   magic "LMSG" 4 | version 4 | name of the group 32 | rank 4 | which of its connections 4
struct Hello {
  static constexpr std::uint32_t kMagic = 0x47534d4c;
  static constexpr std::uint32_t kVersion = 1;

  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::array<char, 32> group{};
  std::int32_t rank = 0;
  std::uint32_t number = 0;
};

// Strangers must not keep those who belong waiting.
constexpr std::chrono::seconds kForHello(1);

std::array<char, 32> group_named(const std::string& name) {
  std::array<char, 32> group{};
  std::copy_n(name.begin(), std::min(name.size(), group.size()), group.begin());
  return group;
}

std::string problem_with(const Hello& theirs, const Hello& mine) {
  if (theirs.magic != Hello::kMagic) return "it does not speak Lockstep's protocol";
  if (theirs.version != Hello::kVersion) {
    return text("it speaks version ", theirs.version, " of the protocol, this rank version ", Hello::kVersion);
  }
  if (theirs.group != mine.group) return "it belongs to another group";
  return "";
}

class Meeting {
 public:
  Meeting(const MeshOptions& options, int count, const std::string& group, Deadline deadline)
      : options_(options), deadline_(deadline), made_(static_cast<std::size_t>(count)) {
    mine_.group = group_named(group);
    mine_.rank = options.rank;
    for (auto& sockets : made_) sockets.resize(static_cast<std::size_t>(options.size));
  }

  void connect(int rank, const std::string& address) {
    try {
      for (std::uint32_t number = 0; number < made_.size(); ++number) {
        auto socket = connect_to(address, deadline_);
        auto hello = mine_;
        hello.number = number;
        write_value(socket, hello, deadline_);
        const auto problem = problem_with(read_value<Hello>(socket, deadline_), mine_);
        if (!problem.empty()) throw ClusterError(problem);
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
    while (!missing().empty()) {
      try {
        welcome(accept_from(listener, deadline_));
      } catch (const DeadlineExceeded& error) {
        throw DeadlineExceeded("connecting to other hosts", error.waited_for(), missing());
      }
    }
  }

  std::vector<Sockets> take() { return std::move(made_); }

 private:
  FileDescriptor& place(int rank, std::uint32_t number) { return made_[number][static_cast<std::size_t>(rank)]; }

  void welcome(FileDescriptor socket) {
    std::string problem;
    try {
      const auto hello = read_value<Hello>(socket, Deadline::after(kForHello));
      problem = problem_with(hello, mine_);
      if (problem.empty() && (hello.rank <= options_.rank || hello.rank >= options_.size ||
                              hello.number >= made_.size() || place(hello.rank, hello.number).open())) {
        problem = text("it says that it is rank ", hello.rank);
      }
      auto answer = mine_;
      if (!problem.empty()) answer.group = {};  // the name is for those who know it
      if (hello.magic == Hello::kMagic) write_value(socket, answer, Deadline::after(kForHello));
      if (problem.empty()) place(hello.rank, hello.number) = std::move(socket);
    } catch (const Error& error) {
      problem = error.what();
    }
    if (!problem.empty()) log_warning(text("turned a connection away: ", problem));
  }

  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int r = options_.rank + 1; r < options_.size; ++r) {
      const auto open = [r](const Sockets& sockets) { return sockets[static_cast<std::size_t>(r)].open(); };
      if (!std::all_of(made_.begin(), made_.end(), open)) ranks.push_back(r);
    }
    return ranks;
  }

  const MeshOptions options_;
  const Deadline deadline_;
  Hello mine_;
  std::vector<Sockets> made_;
};

}  // namespace

std::vector<Sockets> connect_all(const MeshOptions& options, int count, const AllGather& all_gather,
                                 Deadline deadline) {
  const auto listener = listen_at_any_port(options.address);
  const auto all = all_gather(text(random_name(), " ", local_address(listener)));
  constexpr std::size_t kName = 32;
  Meeting meeting(options, count, all[0].substr(0, kName), deadline);
  for (int r = 0; r < options.rank; ++r) meeting.connect(r, all[static_cast<std::size_t>(r)].substr(kName + 1));
  meeting.accept(listener);
  return meeting.take();
}

}  // namespace lockstep
