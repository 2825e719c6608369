#include "elastic/registry.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <thread>

#include "base/expect_says_testing.h"
#include "base/mutex.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

Deadline after_seconds(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

// One member on each of some hosts, each with its own store.
class Registries : public testing::Test {
 protected:
  explicit Registries(int hosts = 4) {
    std::vector<std::string> names, addresses;
    for (int host = 0; host < hosts; ++host) {
      stores_.emplace_back(Store::hold("127.0.0.1:0"));
      names.push_back(std::string(1, static_cast<char>('a' + host)));
      addresses.push_back(stores_.back()->address());
    }
    for (int rank = 0; rank < hosts; ++rank) {
      const auto members = first_members({.rank = rank, .size = hosts}, names, addresses);
      of_rank_.push_back(std::make_unique<Registry>(
          std::make_shared<cluster::ConnectedStores>(*stores_[static_cast<std::size_t>(rank)]), members));
    }
  }

  // Loses a host: nothing is left of its store.
  void lose(int host) {
    of_rank_[static_cast<std::size_t>(host)].reset();
    stores_[static_cast<std::size_t>(host)].reset();
  }
  Registry& of(int rank) { return *of_rank_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<std::optional<Store>> stores_;
  std::vector<std::unique_ptr<Registry>> of_rank_;
};

TEST_F(Registries, AllThatEnterAtTheSameTimeGetOneValue) {
  for (int entry = 0; entry < 50; ++entry) {
    Mutex mutex;
    std::set<std::string> kept;  // guarded by mutex
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        const auto value =
            of(rank).enter("entry " + std::to_string(entry), "of " + std::to_string(rank), after_seconds(30));
        MutexLock lock(mutex);
        kept.insert(value);
      });
    }
    threads.clear();
    EXPECT_EQ(kept.size(), 1U) << entry;
  }
}

TEST_F(Registries, WhatWasDecidedIsFoundByThoseThatRemain) {
  const auto kept = of(3).enter("entry", "of 3", after_seconds(30));
  lose(3);
  EXPECT_EQ(of(1).get({"entry"}, after_seconds(1)), std::vector<std::string>{kept});
  EXPECT_EQ(of(0).enter("entry", "of 0", after_seconds(30)), kept);
}

TEST_F(Registries, HalfOfTheHostsDecideWithTheFirstAlone) {
  lose(2);
  lose(3);
  EXPECT_EQ(of(1).enter("entry", "of 1", after_seconds(30)), "of 1");
  lose(0);
  const auto problem = message_of<ClusterError>([&] { of(1).enter("another", "of 1", after_seconds(0.1)); });
  expect_says(problem, "this process cannot reach most of the job's 4 hosts");
}

}  // namespace
}  // namespace lockstep::elastic
