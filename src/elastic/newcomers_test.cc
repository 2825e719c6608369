#include "elastic/newcomers.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "base/expect_says_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

Deadline in(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

// A job of one process, with a store.
class Newcomers : public testing::Test {
 protected:
  // Returns the newcomers that the chief sees once its watch says that some wait.
  std::vector<Process> wait_for_some(Watch& watch) {
    const auto until = in(30);
    while (!watch.any() && !until.passed()) std::this_thread::yield();
    return watch.waiting();
  }
  static Members wait(Candidate& candidate) {
    return candidate.wait(in(30), [] {}).value();
  }

  Newcomers() { publish(members_, *stores_); }

  const Store store_ = Store::hold("127.0.0.1:0");
  const std::shared_ptr<cluster::ConnectedStores> stores_ = std::make_shared<cluster::ConnectedStores>(store_);
  const Members members_ = first_members({.host = "a"}, store_.address());
  const std::shared_ptr<Registry> registry_ = std::make_shared<Registry>(stores_, members_);
  std::shared_ptr<void> member_ = cluster::show_presence(store_, name_of_process(0));
};

TEST_F(Newcomers, AreSeenTakenInAndForgotten) {
  Candidate candidate(stores_, {.host = "b"}, 0, "model 1");
  Watch watch(registry_, 0, "model 1");
  const auto waiting = wait_for_some(watch);
  ASSERT_EQ(waiting.size(), 1U);
  EXPECT_EQ(waiting[0].host, "b");
  next_generation(members_, *registry_, {.newcomers = waiting}, in(30));
  const auto place = wait(candidate);
  EXPECT_EQ(place.world.rank, 1);
  EXPECT_EQ(place.world.size, 2);
  EXPECT_EQ(place.world.host, "b");
  watch.forget_invited();
  EXPECT_FALSE(watch.any());
}

TEST_F(Newcomers, ThatDoNotFitAreRefusedAndThoseThatHaveGoneAreForgotten) {
  std::optional<Candidate> gone(std::in_place, stores_, World(), 0, "model 1");
  Candidate other(stores_, {}, 0, "model 2");
  Watch watch(registry_, 0, "model 1");
  expect_says(message_of<ClusterError>([&] { wait(other); }), "which has model 1; it has model 2");
  EXPECT_TRUE(watch.any());  // it has seen both
  gone.reset();
  const auto until = in(30);
  while (watch.any() && !until.passed()) std::this_thread::yield();
  EXPECT_TRUE(watch.waiting().empty());
}

TEST_F(Newcomers, GoOnToTheTrainingThatTheMembersAreIn) {
  Watch::tell_end(*stores_, 0, members_);
  Candidate late(stores_, {}, 0, "model 1");
  EXPECT_FALSE(late.wait(in(30), [] {}).has_value());
  Watch watch(registry_, 1, "model 2");
  Candidate next(stores_, {}, 1, "model 2");
  EXPECT_EQ(wait_for_some(watch).size(), 1U);  // not the first one
}

TEST_F(Newcomers, DoNotWaitForAJobThatHasEnded) {
  member_.reset();
  Candidate left_alone(stores_, {}, 1, "model 1");
  expect_says(message_of<ClusterError>([&] { wait(left_alone); }), "all workers of the job");
}

}  // namespace
}  // namespace lockstep::elastic
