// How a job's processes find each other, and what they hear where they cannot. Ranks are processes.
#include "cluster/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>

#include "base/child_process_testing.h"
#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "cluster/resolvers.h"
#include "cluster/store_process_testing.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

Deadline within(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

int free_port() {
  const auto address = transport::local_address(transport::listen_at("127.0.0.1:0", {}));
  return std::atoi(address.substr(address.rfind(':') + 1).c_str());
}

// Returns `clusters` with the store held by another process, as a launcher does: whoever fails has ended before the
// others have asked.
std::vector<Cluster> with_store_of_its_own(std::vector<Cluster> clusters) {
  for (auto& cluster : clusters) {
    cluster.holds_store = false;
    cluster.source = "lockstep run";
  }
  return clusters;
}

// Returns the text of each process that takes part as described; all run at once.
std::vector<std::string> said_by(const std::vector<Cluster>& clusters, double seconds = 20) {
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (const auto& cluster : clusters) {
    children.push_back(std::make_unique<ChildProcess>([&]() -> std::string {
      const auto found = rendezvous(cluster, within(seconds));
      // Rank 0's store must outlive the others' questions.
      const auto all = static_cast<std::int64_t>(clusters.size());
      found.store.add("met", 1, within(seconds));
      while (found.world.rank == 0 && found.store.add("met", 0, within(seconds)) < all) std::this_thread::yield();
      return text("met as rank ", found.world.rank, " at ", found.world.address);
    }));
  }
  std::vector<std::string> said;
  for (const auto& child : children) said.push_back(child->said());
  return said;
}

Cluster tf_config(const std::string& workers, int index) {
  const auto json =
      text(R"({"cluster": {"worker": [)", workers, R"(]}, "task": {"type": "worker", "index": )", index, "}}");
  return from_tf_config([&](const char*) { return json.c_str(); }).value();
}

TEST(Rendezvous, AProcessThatIsAloneHasAStoreOfItsOwn) {
  const auto found = rendezvous(resolve_cluster([](const char*) { return nullptr; }), within(5));
  EXPECT_EQ(found.world.size, 1);
  found.store.set("a", "b", within(5));
  EXPECT_EQ(found.store.get("a", within(5)), "b");
}

// The name need not be known anywhere: a laptop's own name, or another host's list that was copied.
TEST(Rendezvous, RanksOfOneHostNeedNoNameOfIt) {
  const auto port = free_port();
  const auto workers = text(R"("no-such-host.invalid:)", port, R"(", "no-such-host.invalid:)", port + 1, '"');
  const auto said = said_by({tf_config(workers, 0), tf_config(workers, 1)});
  EXPECT_EQ(said[0], "met as rank 0 at 127.0.0.1");
  EXPECT_EQ(said[1], "met as rank 1 at 127.0.0.1");
}

TEST(Rendezvous, TwoProcessesOfOneRankAreToldAtOnce) {
  const auto port = free_port();
  const auto workers = text(R"("localhost:)", port, R"(", "localhost:)", port + 1, R"(", "localhost:)", port + 2, '"');
  const StoreProcess store(text("127.0.0.1:", port));
  const auto begin = within(0);
  const auto said =
      said_by(with_store_of_its_own({tf_config(workers, 0), tf_config(workers, 1), tf_config(workers, 1)}));
  EXPECT_LT(begin.waited().count(), 10);
  for (const auto& one : said) expect_says(one, "was given the same rank");
}

TEST(Rendezvous, ListsOfDifferentLengthAreToldAtOnce) {
  const auto port = free_port();
  const auto two = text(R"("localhost:)", port, R"(", "localhost:)", port + 1, '"');
  const auto three = two + text(R"(, "localhost:)", port + 2, '"');
  const StoreProcess store(text("127.0.0.1:", port));
  const auto begin = within(0);
  const auto said = said_by(with_store_of_its_own({tf_config(two, 0), tf_config(three, 1)}));
  EXPECT_LT(begin.waited().count(), 10);
  for (const auto& one : said) expect_says(one, "those who came before say");
}

// A rank of an mpirun that was killed, with a shell between them.
TEST(Rendezvous, ARankEndsSoonAfterItsMpirun) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    prctl(PR_SET_NAME, "mpirun");
    if (::fork() == 0) {
      prctl(PR_SET_NAME, "sh");
      if (::fork() == 0) {
        prctl(PR_SET_NAME, "rank");
        end_with_launcher();
        const pid_t self = ::getpid();
        if (::write(ends[1], &self, sizeof self) != sizeof self) ::_exit(1);
      }
    }
    for (;;) ::pause();
  }
  ::close(ends[1]);
  pid_t rank = 0;
  ASSERT_EQ(::read(ends[0], &rank, sizeof rank), static_cast<ssize_t>(sizeof rank));
  const FileDescriptor pidfd(static_cast<int>(syscall(SYS_pidfd_open, rank, 0)));
  const pid_t shell_of_rank = [&] {
    pid_t parent = 0;
    std::ifstream file(text("/proc/", rank, "/status"));
    for (std::string word; file >> word;) {
      if (word == "PPid:") file >> parent;
    }
    return parent;
  }();
  ::kill(launcher, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(transport::wait_for_events(pidfd.get(), POLLIN, within(8)));
  ::kill(rank, SIGKILL);
  ::kill(shell_of_rank, SIGKILL);
}

// The process is in a network of its own, with a list of hosts of its own.
TEST(Rendezvous, RankZeroListensEverywhereAndItsNameMayComeLater) {
  ChildProcess test([]() -> std::string {
    const auto hosts = (fresh_folder("meeting", "names") / "hosts").string();
    std::ofstream(hosts) << "127.0.0.1 localhost\n";
    if (unshare(CLONE_NEWNET | CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount(hosts.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0 ||
        std::system("ip link set lo up && ip addr add 10.77.0.1/32 dev lo") != 0) {
      return "no namespaces";
    }
    setenv("LOCKSTEP_TRUSTED_NETWORK", "1", 1);
    ChildProcess later([&]() -> std::string {  // no thread: sanitizers do not let a process with threads fork
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      std::ofstream(hosts, std::ios::app) << "10.77.0.1 rank-zero.test\n";
      return "";
    });
    Cluster zero{.world = {.rank = 0, .size = 2, .host = "a"}, .store = "rank-zero.test:4321", .holds_store = true};
    auto one = zero;
    one.world.rank = 1;
    one.world.host = "b";
    one.holds_store = false;
    const auto by_name = join(said_by({zero, one}), "; ");
    one.store = "127.0.0.1:4321";  // an address that its name does not lead to
    one.world.local_size = 1;
    return by_name + "; " + said_by({zero, one})[1];
  });
  EXPECT_EQ(test.said(), "met as rank 0 at 10.77.0.1; met as rank 1 at 10.77.0.1; met as rank 1 at 127.0.0.1");
}

}  // namespace
}  // namespace lockstep::cluster
