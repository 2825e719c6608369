// The outer step when ranks are lost and come. What it computes otherwise: front_ends/ddp/diloco_test.
#include "gradient/outer_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/wrappers/wrapper.h"

namespace lockstep::gradient {
namespace {

constexpr std::int64_t kNumel = 300;
const DiLoCoOptions kOfOuterStep{.steps = 2};

enum class Breaks { never, before_call, after_call };

// A rank whose calls break off: before the others can complete them, or after.
class BreaksOff final : public collective::Wrapper {
 public:
  BreaksOff(std::shared_ptr<GroupBackend> inner, Breaks breaks) : Wrapper(std::move(inner)), breaks_(breaks) {}
  const char* run(const Call& call, Deadline deadline) override {
    return break_off([&] { return Wrapper::run(call, deadline); });
  }
  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    return break_off([&] { return Wrapper::exchange(calls, deadline); });
  }

 private:
  const char* break_off(const auto& call) {
    if (breaks_ == Breaks::before_call) throw PeerLost(2, 0, "lost");
    const char* const algorithm = call();
    if (breaks_ == Breaks::after_call) throw PeerLost(2, 0, "lost");
    return algorithm;
  }

  const Breaks breaks_;
};

at::Tensor initial() { return at::arange(kNumel, at::kDouble) / 100; }

// How far a rank comes in a step.
at::Tensor step_of(int rank, int step) { return at::sin(at::arange(kNumel, at::kDouble) * (rank + 1) + step); }

// A rank with a parameter.
struct Rank {
  Rank(const Group& group, const DiLoCoOptions& options, at::ScalarType dtype = at::kDouble, bool has_state = true)
      : value(initial().to(dtype)), ranks(group), outer({value}, ranks, options, "the parameters", has_state) {}

  bool step(int rank, int number) {
    value.add_(step_of(rank, number).to(value.scalar_type()));
    return outer.advance();
  }
  void regroup(const Group& group) {
    ranks.regroup(group);
    outer.regroup();
  }

  at::Tensor value;
  Communicator ranks;
  OuterStep outer;
};

// The formula.
struct Formula {
  at::Tensor anchor = initial(), velocity = at::zeros({kNumel}, at::kDouble);

  // `ways`: how far each rank has come.
  void meet(const std::vector<at::Tensor>& ways) {
    auto delta = at::zeros_like(anchor);
    for (const auto& way : ways) delta -= way / static_cast<double>(ways.size());
    velocity = kOfOuterStep.momentum * velocity + delta;
    anchor = anchor - kOfOuterStep.learning_rate * (delta + kOfOuterStep.momentum * velocity);
  }
};

at::Tensor way_of(int rank, int first, int last) {
  auto way = at::zeros({kNumel}, at::kDouble);
  for (int step = first; step <= last; ++step) way += step_of(rank, step);
  return way;
}

void expect_near(const at::Tensor& value, const at::Tensor& expected, double error = 1e-9) {
  EXPECT_LE((value.to(at::kDouble) - expected).abs().max().item<double>(), error);
}

// Ranks 0 and 1 of three make two steps. Rank 2 makes them too, and is lost in the meeting, in which rank r breaks off
// as `breaks` says. Returns the values of ranks 0 and 1 after they have regrouped, and after another meeting.
std::vector<std::vector<at::Tensor>> values_after_a_loss(const std::vector<Breaks>& breaks,
                                                         const DiLoCoOptions& options = kOfOuterStep,
                                                         at::ScalarType dtype = at::kDouble) {
  std::vector<std::vector<at::Tensor>> values(2);
  const auto next = make_thread_groups(2);
  collective::on_ranks(3, [&](const Group& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    Rank self(group.with_backend(std::make_shared<BreaksOff>(group.shared_backend(), breaks[rank])), options, dtype);
    EXPECT_FALSE(self.step(group.rank(), 0));
    try {
      EXPECT_TRUE(self.step(group.rank(), 1));
    } catch (const PeerLost&) {
    }
    if (rank == 2) return;
    self.regroup(next[rank]);
    EXPECT_TRUE(self.outer.is_together());
    values[rank].push_back(self.value.clone());
    EXPECT_FALSE(self.step(group.rank(), 2));
    EXPECT_TRUE(self.step(group.rank(), 3));
    values[rank].push_back(self.value.clone());
  });
  return values;
}

// `in_first_meeting`: the number of ranks whose steps it has. The second one is that of the ranks that are left.
void expect_meetings(int in_first_meeting, const std::vector<std::vector<Breaks>>& losses) {
  Formula formula;
  std::vector<at::Tensor> ways;
  for (int rank = 0; rank < in_first_meeting; ++rank) ways.push_back(way_of(rank, 0, 1));
  formula.meet(ways);
  const auto met = formula.anchor;
  formula.meet({way_of(0, 2, 3), way_of(1, 2, 3)});
  for (const auto& breaks : losses) {
    for (const auto& values : values_after_a_loss(breaks)) {
      expect_near(values.at(0), met);
      expect_near(values.at(1), formula.anchor);
    }
  }
}

TEST(OuterStep, AMeetingThatOneRankHasCompletedCountsForAll) {
  expect_meetings(3, {{Breaks::never, Breaks::after_call, Breaks::never},
                      {Breaks::after_call, Breaks::never, Breaks::never},
                      {Breaks::never, Breaks::never, Breaks::never}});
}

TEST(OuterStep, AMeetingThatNoRankHasCompletedIsMadeByThoseThatAreLeft) {
  expect_meetings(2, {{Breaks::before_call, Breaks::before_call, Breaks::before_call},
                      {Breaks::after_call, Breaks::after_call, Breaks::after_call}});
}

// Half a step of 8 bits of the largest magnitude, twice a meeting; bfloat16 has 8 bits too.
TEST(OuterStep, RoundedMeetingsAreMadeByThoseThatAreLeft) {
  Formula formula;
  formula.meet({way_of(0, 0, 1), way_of(1, 0, 1)});
  const auto met = formula.anchor;
  formula.meet({way_of(0, 2, 3), way_of(1, 2, 3)});
  for (const auto dtype : {DType::bfloat16, DType::int8}) {
    auto options = kOfOuterStep;
    options.dtype = dtype;
    const auto values =
        values_after_a_loss({Breaks::before_call, Breaks::before_call, Breaks::before_call}, options, at::kFloat);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::equal(values[0].at(i), values[1].at(i)));
      expect_near(values[0].at(i), i == 0 ? met : formula.anchor, 0.1);
    }
  }
}

// It takes anchors and velocities, and the place in the schedule; and its own steps before do not count.
TEST(OuterStep, ARankThatComesGetsTheState) {
  Formula formula;
  for (const int first : {0, 2}) formula.meet({way_of(0, first, first + 1), way_of(1, first, first + 1)});
  formula.meet({way_of(0, 4, 4), way_of(1, 4, 4)});
  const auto met = formula.anchor;
  formula.meet({way_of(0, 5, 5), way_of(1, 5, 5), way_of(2, 5, 5)});
  Archive counts;
  const auto next = make_thread_groups(3);
  std::jthread newcomer;
  collective::on_ranks(2, [&](const Group& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    Rank self(group, kOfOuterStep);
    for (int step = 0; step < 5; ++step) self.step(group.rank(), step);
    if (rank == 0) {
      self.outer.counts().save(counts, "counts");
      newcomer = std::jthread([&] {
        try {
          Rank third(make_thread_groups(1)[0], kOfOuterStep, at::kDouble, /*has_state=*/false);
          third.outer.counts().load(counts, "counts")();
          third.value.add_(1);
          third.regroup(next[2]);
          expect_near(third.value, met);
          EXPECT_TRUE(third.step(2, 5));
          expect_near(third.value, formula.anchor);
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
          next[2].abort(error.what());
        }
      });
    }
    self.regroup(next[rank]);
    expect_near(self.value, met);
    EXPECT_TRUE(self.step(group.rank(), 5));
    expect_near(self.value, formula.anchor);
  });
}

TEST(OuterStep, WithoutAnyRankThatHasTheStateItIsAnError) {
  Rank alone(make_thread_groups(1)[0], kOfOuterStep, at::kDouble, /*has_state=*/false);
  const auto message = message_of<ClusterError>([&] { alone.regroup(make_thread_groups(1)[0]); });
  expect_says(message, "all workers that had the state of the training were lost");
}

}  // namespace
}  // namespace lockstep::gradient
