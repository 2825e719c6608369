#include "tpu/programs/compiled_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/expect_says_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::programs {
namespace {

// A worker's launch of two, and its result or error.
struct Launch {
  std::string name = "the training step";
  std::vector<Example> steps;  // of its one replica
  std::vector<bool> updates;
};
struct Agreed {
  std::vector<LaunchAgreement> agreements{2};
  std::vector<std::exception_ptr> errors;
};
Agreed agree(const std::vector<Launch>& launches) {
  Agreed agreed;
  agreed.errors = collective::run_ranks({.group = {.backend = "threads"}}, [&](const Group& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    const auto& launch = launches[rank];
    agreed.agreements[rank] =
        agree_on_launch(Communicator(group, 60, "worker"), launch.name, {launch.steps}, launch.updates);
  });
  return agreed;
}

Example rows(std::int64_t count, double value = 0) { return {at::full({count, 3}, value)}; }

TEST(LaunchAgreement, IsOnTheLargestPartAndAllUpdates) {
  const auto agreed = agree({{.steps = {rows(2), rows(2)}, .updates = {true, false}},
                             {.steps = {rows(4), rows(1)}, .updates = {false, false}}});
  for (std::size_t worker = 0; worker < 2; ++worker) {
    ASSERT_EQ(agreed.errors[worker], nullptr);
    EXPECT_EQ(agreed.agreements[worker].rows, 4);
    EXPECT_EQ(agreed.agreements[worker].updates, (std::vector<bool>{true, false}));
  }
}

TEST(LaunchAgreement, AWorkerWithoutExamplesGetsOne) {
  const auto agreed = agree({{.steps = {rows(0)}, .updates = {false}}, {.steps = {rows(2, 5)}, .updates = {true}}});
  for (std::size_t worker = 0; worker < 2; ++worker) {
    ASSERT_EQ(agreed.errors[worker], nullptr);
    EXPECT_TRUE(at::equal(agreed.agreements[worker].row.x, at::full({1, 3}, 5.0)));
  }
}

// One worker is in fit, with several steps a launch, and the other evaluates.
TEST(LaunchAgreement, OtherLaunchesAreRefusedOnAll) {
  const Launch fits{.steps = std::vector<Example>(20, rows(2)), .updates = std::vector<bool>(20, true)};
  const Launch evaluates{.name = "the evaluation step", .steps = {rows(2)}, .updates = {false}};
  for (const auto& error : agree({evaluates, fits}).errors) {
    expect_says(
        message_of<InvalidArgument>([&] { std::rethrow_exception(error); }),
        "worker 0 the evaluation step for 1 batch(es) of x Float [3]; worker 1 the training step for 20 batch(es)");
  }
}

TEST(LaunchAgreement, NobodyHasAnExample) {
  const Launch none{.steps = {rows(0)}, .updates = {false}};
  for (const auto& error : agree({none, none}).errors) {
    expect_says(message_of<InvalidArgument>([&] { std::rethrow_exception(error); }), "a batch has no examples");
  }
}

}  // namespace
}  // namespace lockstep::programs
