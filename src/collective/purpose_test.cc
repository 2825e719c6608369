// Calls of one kind and size that ranks make for different things, on every backend.
#include <gtest/gtest.h>

#include "base/expect_says_testing.h"
#include "collective/calls.h"
#include "collective/ranks_testing.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/collective/group_wrappers.h"

namespace lockstep::collective {
namespace {

std::string text_of(const std::exception_ptr& error) {
  return error == nullptr ? "nothing was thrown" : message_of([&] { std::rethrow_exception(error); });
}

// Each rank sums one number for purposes[rank]; what the ranks threw.
std::vector<std::string> sum_for(const RankOptions& options, const std::vector<Purpose>& purposes,
                                 bool checked = false) {
  const auto errors = run_ranks(options, [&](const Group& given) {
    const auto group = checked ? with_checks(given, -1) : given;
    double value = 1;
    auto call = Call::all_reduce({&value, 1, DType::float64}, ReduceOp::sum);
    call.purpose = purposes[static_cast<std::size_t>(group.rank())];
    group.run(call, soon());
    EXPECT_EQ(value, group.size());
  });
  std::vector<std::string> texts;
  for (const auto& error : errors) texts.push_back(text_of(error));
  return texts;
}

std::string joined(const std::vector<std::string>& texts) { return texts[0] + " | " + texts[1]; }

TEST(Purpose, CallsForDifferentThingsAreRefusedOnEveryBackend) {
  const Purpose first("bucket 0 of model 1"), second("bucket 0 of model 2");
  auto names = backends();
  names.push_back("threads");
  for (const auto& name : names) {
    SCOPED_TRACE(name);
    for (const int ranks_per_host : {1, 2}) {
      const RankOptions options{.group = {.backend = name},
                                .ranks_per_host = name == "hierarchical" ? ranks_per_host : 2};
      EXPECT_EQ(joined(sum_for(options, {first, first})), "nothing was thrown | nothing was thrown");
      const auto said = joined(sum_for(options, {first, second}));
      expect_says(said, "the ranks' calls differ: rank ");
      expect_says(said, "calls all_reduce of 1 x float64, sum, for bucket 0 of model 1");
      expect_says(said, "for bucket 0 of model 2");
    }
  }
}

TEST(Purpose, ACallThatTellsNoneDoesNotAgreeWithOneThatDoes) {
  const auto said = joined(sum_for({.group = {.backend = "threads"}}, {Purpose("what it is for"), Purpose()}));
  expect_says(said, "rank 0 calls all_reduce of 1 x float64, sum, for what it is for, rank 1 calls all_reduce of 1 x");
}

TEST(Purpose, IsComparedByChecksAsWell) {
  const auto said = joined(
      sum_for({.group = {.backend = "tcp"}}, {Purpose("one thing"), Purpose("another thing")}, /*checked=*/true));
  expect_says(said, "for one thing");
  expect_says(said, "for another thing");
}

TEST(Purpose, OfMessagesMustBeEqualOnBothSides) {
  const auto errors = run_ranks({.group = {.backend = "tcp"}}, [](const Group& group) {
    float value = 1;
    const Buffer buffer{&value, 1, DType::float32};
    auto call = group.rank() == 0 ? Call::send(buffer, 1) : Call::recv(buffer, 0);
    call.purpose = Purpose(group.rank() == 0 ? "the activations" : "the gradients");
    group.run(call, soon());
  });
  expect_says(text_of(errors[1]), "for the activations");
  expect_says(text_of(errors[1]), "for the gradients");
}

TEST(Purpose, OfACommunicatorIsThatOfItsOwnCalls) {
  const auto errors = run_ranks({.group = {.backend = "threads"}}, [](const Group& group) {
    const auto ranks = Communicator(group, 30);
    ranks.with_purpose(Purpose("the same")).all(true);
    ranks.with_purpose(Purpose(group.rank() == 0 ? "the loss" : "the norm")).any(true);
  });
  expect_says(text_of(errors[0]), "for the loss");
  expect_says(text_of(errors[0]), "for the norm");
}

TEST(Purpose, OfBackwardDiffersAndHasWords) {
  const Purpose forward("layer 1");
  EXPECT_NE(backward_of(forward), forward);
  EXPECT_EQ(backward_of(forward).words(), "the backward of layer 1");
  EXPECT_FALSE(backward_of(Purpose()).told());
}

TEST(Purpose, ObjectsOfAGroupAreNumberedAlikeOnAllRanks) {
  const auto groups = make_thread_groups(2);
  for (const auto& group : groups) {
    EXPECT_EQ(group.next_number(), 0);
    EXPECT_EQ(group.next_number(), 1);
  }
}

}  // namespace
}  // namespace lockstep::collective
