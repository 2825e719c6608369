#include "cluster/liveness.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

using Sign = Liveness::Sign;

struct Process {
  std::string store, name;
};

// A store that may be silent, and a clock.
class OneStore final : public Stores {
 public:
  std::string compare_set(const std::string&, const std::string& key, const std::string&, const std::string&) override {
    if (is_silent) throw ClusterError("no answer");
    return entries[key];
  }
  std::vector<std::optional<std::string>> get(const std::string&, const std::vector<std::string>&, Deadline) override {
    return {};
  }
  double now() const override { return seconds; }
  bool passed(Deadline) const override { return false; }
  void pause(double) override {}

  std::map<std::string, std::string> entries;
  bool is_silent = false;
  double seconds = 100;
};

TEST(Liveness, ASilentStoreIsLostAfterSomeTimeAndSomeLooks) {
  const auto store = std::make_shared<OneStore>();
  Liveness liveness(store, {.seconds = 2, .looks = 3});
  const Process a{"host", "a"};
  EXPECT_EQ(liveness.look(a.store, a.name), Sign::lives);
  store->is_silent = true;
  EXPECT_EQ(liveness.look(a.store, a.name), Sign::silent);
  store->seconds += 10;
  EXPECT_EQ(liveness.look("host", "b"), Sign::silent);  // the second look at the store
  EXPECT_EQ(liveness.look(a.store, a.name), Sign::lost);
  store->is_silent = false;
  EXPECT_EQ(liveness.look(a.store, a.name), Sign::lives);
  store->is_silent = true;
  for (int looks = 0; looks < 5; ++looks) EXPECT_EQ(liveness.look(a.store, a.name), Sign::silent);
  store->seconds += 2;
  EXPECT_EQ(liveness.look(a.store, a.name), Sign::lost);
}

TEST(Liveness, AProcessThatShowedItsPresenceHasEnded) {
  const auto store = Store::hold("127.0.0.1:0");
  const auto stores = std::make_shared<ConnectedStores>(store);
  Liveness liveness(stores);
  auto presence = show_presence(store, "a");
  const std::vector<Process> both{{store.address(), "a"}, {store.address(), "b"}};
  EXPECT_EQ(liveness.look(both), (std::vector{Sign::lives, Sign::lives}));
  presence.reset();
  store.get(key_of_end("a"), Deadline::after(std::chrono::seconds(30)));
  EXPECT_EQ(liveness.look(both), (std::vector{Sign::ended, Sign::lives}));
}

}  // namespace
}  // namespace lockstep::cluster
