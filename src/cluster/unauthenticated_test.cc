// Processes that do not belong to a job: other users of the host, and connections that prove nothing.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/child_process_testing.h"
#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/hash.h"
#include "base/text.h"
#include "cluster/rendezvous.h"
#include "cluster/store_process_testing.h"
#include "cluster/store_server.h"
#include "lockstep/cluster/store.h"
#include "transport/connections.h"
#include "transport/handshake.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kAnotherUser = 65534;

Deadline in_time_of(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

TEST(UserToken, IsMadeOnceForItsOwnerAlone) {
  const auto home = fresh_folder("strangers", "home").string();
  const auto token = transport::user_token(home);
  EXPECT_EQ(token.size(), 32U);
  EXPECT_EQ(transport::user_token(home), token);
  const auto permissions = fs::status(home + "/.lockstep/token").permissions();
  EXPECT_EQ(permissions & (fs::perms::group_all | fs::perms::others_all), fs::perms::none);
  fs::permissions(home + "/.lockstep/token", fs::perms::others_read, fs::perm_options::add);
  expect_says(message_of<ClusterError>([&] { transport::user_token(home); }), "may be read by others");
  fs::permissions(home + "/.lockstep", fs::perms::others_write, fs::perm_options::add);
  expect_says(message_of<ClusterError>([&] { transport::user_token(home); }), "nobody else may write to");
}

TEST(UserToken, ProcessesThatMakeItAtTheSameTimeHaveTheSame) {
  const auto home = fresh_folder("strangers", "together").string();
  std::vector<std::future<std::string>> tokens;
  for (int i = 0; i < 8; ++i)
    tokens.push_back(std::async(std::launch::async, [&] { return transport::user_token(home); }));
  const auto token = transport::user_token(home);
  for (auto& other : tokens) EXPECT_EQ(other.get(), token);
}

TEST(UserToken, WhereNothingCanBeKeptThereIsNone) {
  const auto file = fresh_folder("strangers", "none") / "file";
  std::ofstream(file) << "x";
  EXPECT_EQ(transport::user_token(file.string()), "");
  EXPECT_EQ(transport::user_token(""), "");
}

// A user's token keeps other users out on loopback, and is no reason to listen elsewhere.
TEST(UserToken, IsNoJobsToken) {
  const Access access{.token = std::string(32, 'u'), .of_this_user = true};
  EXPECT_NO_THROW(transport::listen_at("127.0.0.1:0", access));
  expect_says(message_of<ClusterError>([&] { transport::listen_at("0.0.0.0:0", access); }), "needs a token");
}

TEST(Strangers, AnotherUserCannotUseAStoreOnLoopback) {
  const StoreProcess holder;  // no launcher gave a token
  const auto store = Store::connect(holder.address(), in_time_of(5));
  store.set("weights at", "home", in_time_of(5));
  ChildProcess other([&]() -> std::string {
    if (::setuid(kAnotherUser) != 0) return "cannot become another user";
    for (const auto& access : {Access{}, access_of_environment()}) {
      try {
        Store::connect(store.address(), in_time_of(2), access).set("weights at", "mine", in_time_of(2));
        return "it wrote";
      } catch (const ClusterError&) {
      }
    }
    return "kept out";
  });
  EXPECT_EQ(other.said(), "kept out");
  EXPECT_EQ(store.get("weights at", in_time_of(5)), "home");
}

// More connections than the process may have descriptors, and they say nothing.
TEST(Strangers, SilentConnectionsUseUpNothing) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 4096);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  ChildProcess holder([&]() -> std::string {
    const rlimit few{256, 256};
    if (setrlimit(RLIMIT_NOFILE, &few) != 0) return "no limit";
    const auto store = Store::hold("127.0.0.1:0", {.token = std::string(32, 't')});
    const auto address = store.address() + "\n";
    if (::write(ready[1], address.data(), address.size()) < 0) return "no pipe";
    const auto said = store.get("done", in_time_of(60));
    // The process can still open what it needs.
    for (int i = 0; i < 32; ++i) {
      if (::dup(0) < 0) return "no descriptor is left";
    }
    return said;
  });
  ::close(ready[1]);
  char bytes[100]{};
  ASSERT_GT(::read(ready[0], bytes, sizeof bytes), 0);
  const std::string address(bytes, std::string(bytes).find('\n'));
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 1100; ++i) silent.push_back(transport::connect_to(address, in_time_of(20)));
  const Access ours{.token = std::string(32, 't')};
  const auto begin = Deadline::after(std::chrono::seconds(0));
  const auto store = Store::connect(address, in_time_of(20), ours);
  EXPECT_LT(begin.waited().count(), 5);
  store.set("done", "all is well", in_time_of(20));
  EXPECT_EQ(holder.said(), "all is well");
}

// Openings of a stranger, whole and begun, each on a connection that stays.
TEST(Strangers, GreetingsWithoutAProofDelayNobody) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 4096);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  const StoreProcess holder;
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 1200; ++i) {
    strangers.push_back(transport::connect_to(holder.address(), in_time_of(20)));
    const auto& one = strangers.back();
    transport::write_value(one, transport::fresh(store_greeting()), in_time_of(5));
    if (i % 2 == 0) transport::write_value(one, transport::other_end_of(one), in_time_of(5));
    if (i % 4 == 0) transport::write_value(one, transport::Proof{}, in_time_of(5));
  }
  const auto begin = in_time_of(0);
  Store::connect(holder.address(), in_time_of(20)).set("a", "b", in_time_of(20));
  EXPECT_LT(begin.waited().count(), 5);
}

// A stranger's process: it takes these ports, and passes what arrives at the first one on to `to`, and back.
void relay_as_another_user(const std::vector<int>& ports, int to, int told) {
  if (::setuid(kAnotherUser) != 0) throw std::runtime_error("cannot become another user");
  std::vector<FileDescriptor> taken;
  for (const int port : ports) taken.push_back(transport::listen_at(text("127.0.0.1:", port), {}));
  if (::write(told, "x", 1) != 1) throw std::runtime_error("no pipe");
  const auto pass = [](const FileDescriptor& from, const FileDescriptor& into) {
    std::array<char, 4096> bytes;
    for (ssize_t count = 1; count > 0;) {
      transport::wait_for_events(from.get(), POLLIN, Deadline::never());
      count = ::recv(from.get(), bytes.data(), bytes.size(), 0);
      if (count > 0) ::send(into.get(), bytes.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL);
    }
    for (const auto* end : {&from, &into}) ::shutdown(end->get(), SHUT_RDWR);
  };
  while (true) {
    std::thread([&pass, to, one = transport::accept_from(taken[0], Deadline::never())] {
      std::string problem;
      const auto other = transport::connect_once(text("127.0.0.1:", to), in_time_of(5), problem);
      if (!other.open()) return;
      std::jthread back([&] { pass(other, one); });
      pass(one, other);
    }).detach();
  }
}

// Runs the two ranks of a job while a stranger has the first `taken` of the ports that follow from the job's name.
// Returns what the ranks say, and after how many seconds.
std::pair<std::string, double> met_beside_a_stranger(const std::string& job, int taken) {
  const auto port = [&](int candidate) {
    return 10'000 + static_cast<int>(mix(hash_of(job), static_cast<std::uint64_t>(candidate)) % 20'000);
  };
  std::vector<int> ports;
  for (int i = 0; i < taken; ++i) ports.push_back(port(i));
  int ready[2];
  if (::pipe(ready) != 0) return {"no pipe", 0};
  const ChildProcess stranger([&]() -> std::string {
    relay_as_another_user(ports, port(taken), ready[1]);
    return "";
  });
  char byte = 0;
  if (::read(ready[0], &byte, 1) != 1) return {"no stranger", 0};
  const auto begin = in_time_of(0);
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (const int rank : {0, 1}) {
    ranks.push_back(std::make_unique<ChildProcess>([&, rank]() -> std::string {
      const Cluster cluster{.world = {.rank = rank, .size = 2, .local_rank = rank, .local_size = 2, .host = "here"},
                            .store = "127.0.0.1",
                            .holds_store = rank == 0,
                            .job = job,
                            .source = "Slurm"};
      const auto found = rendezvous(cluster, in_time_of(30));
      found.store.add("met", 1, in_time_of(30));
      while (rank == 0 && found.store.add("met", 0, in_time_of(30)) < 2) std::this_thread::yield();
      return text("rank ", rank, " met; ");
    }));
  }
  std::string said;
  for (const auto& rank : ranks) said += rank->said();
  return {said, begin.waited().count()};
}

TEST(Strangers, ARelayAtAPortThatFollowsFromTheJobsNameIsNotUsed) {
  const auto [said, seconds] = met_beside_a_stranger("a job with a relay", 1);
  EXPECT_EQ(said, "rank 0 met; rank 1 met; ");
  EXPECT_LT(seconds, 10);
}

// The other ports follow from the token.
TEST(Strangers, AllPortsThatFollowFromTheJobsNameMayBeTaken) {
  const auto [said, seconds] = met_beside_a_stranger("a job without ports", 8);
  EXPECT_EQ(said, "rank 0 met; rank 1 met; ");
  EXPECT_LT(seconds, 20);
}

TEST(Strangers, SilentConnectionsDoNotKeepRanksApart) {
  std::promise<std::string> address_of_zero;
  const auto address = address_of_zero.get_future().share();
  std::vector<transport::Sockets> zero;
  std::jthread first([&] {
    zero = transport::connect_all(
        {.rank = 0, .size = 2}, 2,
        [&](const std::string& mine) {
          address_of_zero.set_value(mine);
          return std::vector<std::string>{mine, ""};
        },
        in_time_of(60));
  });
  std::vector<FileDescriptor> strangers;
  const auto begin = Deadline::after(std::chrono::seconds(0));
  const auto one = transport::connect_all(
      {.rank = 1, .size = 2}, 2,
      [&](const std::string& mine) {
        for (int i = 0; i < 20; ++i) {
          strangers.push_back(transport::connect_to(address.get().substr(address.get().find(' ') + 1), in_time_of(5)));
        }
        return std::vector<std::string>{address.get(), mine};
      },
      in_time_of(60));
  first.join();
  EXPECT_LT(begin.waited().count(), 5);
  EXPECT_TRUE(zero[0][1].open() && one[1][0].open());
}

TEST(Strangers, WarningsAreCountedAndNotRepeated) {
  const auto store = Store::hold("127.0.0.1:0");
  testing::internal::CaptureStderr();
  const std::string garbage(200, 'x');
  for (int i = 0; i < 500; ++i) {
    const auto socket = transport::connect_to(store.address(), in_time_of(5));
    transport::write_all(socket, std::as_bytes(std::span(garbage)), in_time_of(5));
    char byte = 0;
    transport::wait_for_events(socket.get(), POLLIN, in_time_of(5));
    EXPECT_LE(recv(socket.get(), &byte, 1, 0), 0);
  }
  const auto printed = testing::internal::GetCapturedStderr();
  EXPECT_LE(std::count(printed.begin(), printed.end(), '\n'), 2) << printed;
}

}  // namespace
}  // namespace lockstep::cluster
