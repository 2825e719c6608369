#include "lockstep/parallel/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parallel {
namespace {

using Kind = PipelineAction::Kind;

struct Named {
  MakePipelineSchedule make;
  int stages_a_rank;
};

const std::vector<Named> kAll{{schedules::gpipe, 1},       {schedules::one_forward_one_backward, 1},
                              {schedules::interleaved, 2}, {schedules::interleaved, 3},
                              {schedules::zero_bubble, 1}, {schedules::zero_bubble_v, 2}};

// The most microbatches of which a rank has activations, in whole model parts of a rank.
double most_in_flight(const PipelineSchedule& schedule, int rank) {
  int now = 0, most = 0;
  for (const auto& action : schedule.actions[static_cast<std::size_t>(rank)]) {
    if (action.kind == Kind::forward) most = std::max(most, ++now);
    if (action.kind == Kind::backward || action.kind == Kind::backward_weight) --now;
  }
  return most * static_cast<double>(schedule.ranks()) / schedule.stages();
}

TEST(PipelineSchedule, AllCanBeCarriedOut) {
  for (const auto& [make, stages] : kAll) {
    for (int ranks = 1; ranks <= 6; ++ranks) {
      for (int rounds = 1; rounds <= 4; ++rounds) {
        const auto schedule = make(ranks, stages * ranks, rounds * ranks, {{}});
        SCOPED_TRACE(text(schedule.name, " ", ranks, " ranks, ", schedule.microbatches, " microbatches"));
        check_schedule(schedule);
      }
    }
  }
}

TEST(PipelineSchedule, TheirBubblesAreThoseOfThePapers) {
  for (const int ranks : {2, 4, 8}) {
    for (const int microbatches : {ranks, 2 * ranks, 4 * ranks}) {
      SCOPED_TRACE(text(ranks, " ranks, ", microbatches, " microbatches"));
      const auto total = [&](MakePipelineSchedule make, int stages) {
        return predict_times(make(ranks, stages * ranks, microbatches, {{}})).total / stages;
      };
      const double work = 3.0 * microbatches, fill = ranks - 1;
      EXPECT_DOUBLE_EQ(total(schedules::gpipe, 1), work + 3 * fill);
      EXPECT_DOUBLE_EQ(total(schedules::one_forward_one_backward, 1), work + 3 * fill);
      EXPECT_DOUBLE_EQ(total(schedules::interleaved, 2), work + 3 * fill / 2);
      EXPECT_DOUBLE_EQ(total(schedules::zero_bubble, 1), work + fill);
      EXPECT_LE(total(schedules::zero_bubble_v, 2), work + fill);
    }
  }
}

TEST(PipelineSchedule, TheirMemoryIsThatOfThePapers) {
  for (const int ranks : {2, 4}) {
    const int microbatches = 4 * ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(most_in_flight(schedules::gpipe(ranks, ranks, microbatches), rank), microbatches);
      EXPECT_EQ(most_in_flight(schedules::one_forward_one_backward(ranks, ranks, microbatches), rank), ranks - rank);
      EXPECT_LE(most_in_flight(schedules::zero_bubble(ranks, ranks, microbatches), rank), ranks);
      EXPECT_LE(most_in_flight(schedules::zero_bubble_v(ranks, 2 * ranks, microbatches), rank), ranks);
    }
  }
}

TEST(PipelineSchedule, OrdersAreChosenByCosts) {
  const std::vector<PipelineCosts> costs{{.forward = 1, .backward_input = 1.3, .backward_weight = 0.65}};
  const auto idle = [&](const std::vector<PipelineCosts>& chosen_by) {
    return predict_times(schedules::zero_bubble_v(2, 4, 8, chosen_by), costs).idle_share;
  };
  EXPECT_LT(idle(costs), 0.05);
  EXPECT_GT(idle({{}}), 0.1);
}

// Any exchange of two actions on a rank is either harmless or found.
TEST(PipelineSchedule, DeadlocksAreFound) {
  std::mt19937 random(1);
  int found = 0;
  for (int i = 0; i < 500; ++i) {
    auto schedule = schedules::one_forward_one_backward(3, 3, 5);
    auto& actions = schedule.actions[random() % 3];
    std::swap(actions[random() % actions.size()], actions[random() % actions.size()]);
    try {
      check_schedule(schedule);
      for (const auto& of_rank : predict_times(schedule).of_actions) EXPECT_EQ(of_rank.size(), 10U);
    } catch (const InvalidArgument& error) {
      ++found;
      EXPECT_NE(std::string(error.what()).find("deadlock: rank "), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(found, 50);

  auto schedule = schedules::one_forward_one_backward(2, 2, 3);
  std::swap(schedule.actions[1][0], schedule.actions[1][1]);
  expect_says(
      message_of<InvalidArgument>([&] { check_schedule(schedule); }),
      "deadlock: rank 0's backward of microbatch 0 at stage 0 waits for the backward of microbatch 0 at stage 1, "
      "which rank 1 is to do later; rank 1's backward of microbatch 0 at stage 1 waits for the forward");
}

TEST(PipelineSchedule, WhatIsMissingIsFound) {
  const auto refused = [](const auto& change, const std::string& message) {
    auto schedule = schedules::zero_bubble(2, 2, 2);
    change(schedule.actions[1]);
    expect_says(message_of<InvalidArgument>([&] { check_schedule(schedule); }), message);
  };
  const auto at = [](std::vector<PipelineAction>& actions, Kind kind) {
    return std::find_if(actions.begin(), actions.end(), [&](const auto& action) { return action.kind == kind; });
  };
  refused([&](auto& actions) { actions.erase(at(actions, Kind::forward)); },
          "the forward of microbatch 0 at stage 1 is missing");
  refused([&](auto& actions) { actions.erase(at(actions, Kind::backward_weight)); },
          "the backward_weight of microbatch 0 at stage 1 is missing");
  refused([&](auto& actions) { actions.push_back(*at(actions, Kind::forward)); },
          "the forward of microbatch 0 at stage 1 is there twice");
  refused([&](auto& actions) { at(actions, Kind::forward)->stage = 0; }, "a stage of rank 0");
  refused([&](auto& actions) { at(actions, Kind::forward)->microbatch = 2; }, "of 2 stages and 2 microbatches");
}

TEST(PipelineSchedule, NumbersThatDoNotFitAreRefused) {
  expect_says(message_of<InvalidArgument>([&] { schedules::gpipe(2, 3, 4); }),
              "3 stages on 2 ranks; it needs one stage a rank");
  expect_says(message_of<InvalidArgument>([&] { schedules::interleaved(2, 4, 3); }),
              "both must be multiples of the number of ranks, 2");
  expect_says(message_of<InvalidArgument>([&] { schedules::zero_bubble_v(2, 2, 4); }), "it needs two stages a rank");
  expect_says(message_of<InvalidArgument>([&] { schedules::gpipe(2, 2, 0); }), "0 microbatches; all must be above 0");
}

TEST(PipelineSchedule, IsDrawnAsText) {
  EXPECT_EQ(draw_schedule(schedules::one_forward_one_backward(2, 2, 2)),
            "rank 0  F0 F1 .  .  B0--- .  B1--- \n"
            "rank 1  .  F0 B0--- F1 B1--- .  .  \n");
}

}  // namespace
}  // namespace lockstep::parallel
