// A Store in an etcd cluster of three does what one over TCP does, also when a member of the cluster is killed.
#include "cluster/etcd/store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <future>
#include <optional>
#include <set>
#include <thread>

#include "base/expect_says_testing.h"
#include "cluster/etcd/etcd_cluster_testing.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/store.h"

namespace lockstep::etcd {
namespace {

using namespace std::chrono_literals;

const Access kAccess{.trusted_network = true};

Deadline soon() { return Deadline::after(20s); }

EtcdCluster& shared_cluster() {
  static EtcdCluster cluster(3);
  return cluster;
}

struct Kind {
  const char* name;
  bool is_etcd;
};

// A store of either kind.
class AnyStore : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam().is_etcd) {
      static int jobs = 0;
      address_ = shared_cluster().address(text("job-", getpid(), "-", jobs++));
    } else {
      held_ = Store::hold("127.0.0.1:0", kAccess);
      address_ = held_->address();
    }
  }
  Store connect() const { return connect(kAccess); }
  Store connect(const Access& access) const {
    if (GetParam().is_etcd) return Store(EtcdStore::connect(address_, soon(), access));
    return Store::connect(address_, soon(), access);
  }

  std::optional<Store> held_;
  std::string address_;
};

TEST_P(AnyStore, KeepsWhatIsSetAndWaitsForWhatIsNot) {
  const auto one = connect(), other = connect().prefixed("a/");
  one.set("a/x", "1", soon());
  EXPECT_EQ(other.get("x", soon()), "1");
  auto waits = std::async(std::launch::async, [&] { return other.get({"x", "y", "z"}, soon()); });
  one.set("a/y", "", soon());
  one.set("a/z", std::string(1 << 20, 'z'), soon());
  EXPECT_EQ(waits.get(), (std::vector<std::string>{"1", "", std::string(1 << 20, 'z')}));
}

TEST_P(AnyStore, SaysWhichKeysNeverCame) {
  const auto store = connect();
  store.set("b", "1", soon());
  try {
    store.get({"a", "b", "c"}, Deadline::after(100ms));
    FAIL();
  } catch (const DeadlineExceeded& late) {
    EXPECT_EQ(late.ranks(), (std::vector<int>{0, 2}));
  }
}

TEST_P(AnyStore, ManyKeysAreReadAtOnce) {
  const auto store = connect();
  std::vector<std::string> keys, values;
  for (int i = 0; i < 250; ++i) {
    keys.push_back(text("key ", i));
    values.push_back(text(i));
  }
  auto waits = std::async(std::launch::async, [&] { return connect().get(keys, soon()); });
  for (std::size_t i = 0; i < keys.size(); ++i) store.set(keys[i], values[i], soon());
  EXPECT_EQ(waits.get(), values);
}

TEST_P(AnyStore, AddsEveryNumberOnce) {
  std::vector<std::jthread> threads;
  Mutex mutex;
  std::set<std::int64_t> sums;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const auto store = connect();
      for (int i = 0; i < 10; ++i) {
        const auto sum = store.add("n", 1, soon());
        MutexLock lock(mutex);
        sums.insert(sum);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(sums.size(), 40U);
  EXPECT_EQ(connect().add("n", -40, soon()), 0);
  connect().set("word", "x", soon());
  EXPECT_THROW(connect().add("word", 1, soon()), ClusterError);
  connect().set("most", std::to_string(std::numeric_limits<std::int64_t>::max()), soon());
  EXPECT_THROW(connect().add("most", 1, soon()), ClusterError);
}

TEST_P(AnyStore, OneOfManyTakesAPlace) {
  std::vector<std::future<std::string>> found;
  for (int t = 0; t < 4; ++t) {
    found.push_back(
        std::async(std::launch::async, [this, t] { return connect().compare_set("place", "", text(t), soon()); }));
  }
  const auto taken = found[0].get();
  for (std::size_t t = 1; t < found.size(); ++t) EXPECT_EQ(found[t].get(), taken);
  const auto store = connect();
  EXPECT_EQ(store.compare_set("place", "", "", soon()), taken);
  EXPECT_EQ(store.compare_set("place", "another", "x", soon()), taken);
  EXPECT_EQ(store.compare_set("place", taken, "next", soon()), "next");
  EXPECT_EQ(store.compare_set("nobody", "x", "y", soon()), "");
}

TEST_P(AnyStore, WaitersFailWithTheFirstReason) {
  const auto store = connect();
  auto waits = std::async(std::launch::async, [&] {
    return message_of<ClusterError>([&] {
      connect().get(std::vector<std::string>{"group 1/rank 0", "group 1/rank 1"}, soon());
    });
  });
  store.set("group 1/rank 0", "there", soon());
  store.fail_waiters("group 2/", "of another group", soon());
  store.fail_waiters("group 1/", "of another rank", soon(), "/rank 2");
  store.fail_waiters("group 1/", "rank 1 will not come", soon(), "/rank 1");
  store.fail_waiters("group 1/", "a later reason", soon(), "/rank 1");
  EXPECT_EQ(waits.get(), "rank 1 will not come");
  EXPECT_EQ(store.get("group 1/rank 0", soon()), "there");
}

TEST_P(AnyStore, AKeyIsSetWhenItsOwnerEnds) {
  const auto store = connect();
  auto presence = store.set_at_end("end", "reached", soon());
  EXPECT_EQ(store.compare_set("end", "", "", soon()), "");
  auto waits = std::async(std::launch::async, [&] { return connect().get("end", soon()); });
  presence.reset();
  EXPECT_EQ(waits.get(), "reached");
  presence = store.set_at_end("end", "again", soon());
  presence.reset();
  EXPECT_EQ(store.get("end", soon()), "reached");
}

TEST_P(AnyStore, IsForThoseWithItsToken) {
  const Access ours{.token = std::string(32, 'a')}, another{.token = std::string(32, 'b')};
  if (!GetParam().is_etcd) {
    held_ = Store::hold("127.0.0.1:0", ours);
    address_ = held_->address();
  }
  connect(ours).set("x", "1", soon());
  EXPECT_THROW(connect(another), ClusterError);
  EXPECT_EQ(connect(ours).get("x", soon()), "1");
}

INSTANTIATE_TEST_SUITE_P(Kinds, AnyStore, testing::Values(Kind{"tcp", false}, Kind{"etcd", true}),
                         [](const auto& kind) { return kind.param.name; });

Store in_etcd(const std::string& address) { return Store(EtcdStore::connect(address, soon(), kAccess)); }

// Runs in a process of its own, which the next test kills: a forked one could not use gRPC.
constexpr const char* kOwnedStore = "LOCKSTEP_TEST_OWNED_STORE";
TEST(Etcd, DISABLED_AnOwner) {
  const auto store = in_etcd(std::getenv(kOwnedStore));
  const auto presence = store.set_at_end(text("end of ", getpid()), "killed", soon());
  store.set(text("owner ", getpid()), "there", soon());
  for (;;) pause();
}

TEST(Etcd, AKeyIsSetWhenItsOwnerWasKilled) {
  const auto address = shared_cluster().address("killed");
  const auto store = in_etcd(address);
  for (const bool is_noticed : {false, true}) {
    SCOPED_TRACE(is_noticed);
    const ChildProcess process([&]() -> std::string {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      setenv(kOwnedStore, address.c_str(), 1);
      execl("/proc/self/exe", "owner", "--gtest_also_run_disabled_tests", "--gtest_filter=*AnOwner", nullptr);
      return "not started";
    });
    const int owner = process.pid();
    store.get(text("owner ", owner), soon());
    EXPECT_EQ(store.compare_set(text("end of ", owner), "", "", soon()), "");
    const auto begin = Deadline::Clock::now();
    kill(owner, SIGKILL);
    if (is_noticed) store.backend().notice_end(owner, soon());
    EXPECT_EQ(store.get(text("end of ", owner), soon()), "killed");
    EXPECT_LT(Deadline::Clock::now() - begin, is_noticed ? 1s : 10s);
  }
}

TEST(Etcd, AMemberOfTheClusterMayBeKilled) {
  EtcdCluster cluster(3);
  const auto store = in_etcd(cluster.address("job")), other = in_etcd(cluster.address("job"));
  auto presence = other.set_at_end("end", "reached", soon());
  store.set("before", "1", soon());
  auto waits = std::async(std::launch::async, [&] {
    return other.get(std::vector<std::string>{"before", "after"}, soon());
  });
  cluster.kill_member(0);
  store.set("after", "2", soon());
  EXPECT_EQ(waits.get(), (std::vector<std::string>{"1", "2"}));
  EXPECT_EQ(store.add("n", 1, soon()), 1);
  std::this_thread::sleep_for(std::chrono::seconds(kLeaseSeconds + 2));  // its lease is renewed by the others
  EXPECT_EQ(store.compare_set("end", "", "", soon()), "");
}

// Attempts to connect that were refused for longer than gRPC waits between them.
TEST(Etcd, AClusterMayBeginAfterItsClients) {
  const EtcdCluster cluster(3, 3s);
  in_etcd(cluster.address("job")).set("x", "1", soon());
}

TEST(Etcd, BadAddressesAreNamed) {
  const auto problem = [](const std::string& address) {
    return message_of<InvalidArgument>([&] { Store::connect(address, soon(), kAccess); });
  };
  expect_says(problem("etcd://a:1,b/job"), "\"b\" is no host and port");
  expect_says(problem("etcd://a:1"), "without the job's name");
  expect_says(problem("etcd:///job"), "without a host");
  expect_says(problem("etcd://a:1/two words"), "whose job's name has a slash, a comma or a space");
}

TEST(Etcd, AClusterThatDoesNotAnswerIsNamed) {
  const auto why = message_of<DeadlineExceeded>(
      [] { EtcdStore::connect("etcd://127.0.0.1:9/job", Deadline::after(300ms), kAccess); });
  expect_says(why, "etcd at 127.0.0.1:9");
}

}  // namespace
}  // namespace lockstep::etcd
