#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parallel/pipeline_costs.h"

namespace lockstep {
namespace schedules {
namespace {

using Kind = PipelineAction::Kind;

PipelineSchedule begin(const char* name, int ranks, int stages, int microbatches) {
  if (ranks < 1 || stages < 1 || microbatches < 1) {
    throw InvalidArgument(text(name, ": ", ranks, " ranks, ", stages, " stages and ", microbatches,
                               " microbatches; all must be above 0"));
  }
  PipelineSchedule schedule{.name = name, .microbatches = microbatches};
  schedule.actions.resize(static_cast<std::size_t>(ranks));
  for (int stage = 0; stage < stages; ++stage) schedule.rank_of_stage.push_back(stage % ranks);
  return schedule;
}

PipelineSchedule begin_one_stage_a_rank(const char* name, int ranks, int stages, int microbatches) {
  if (stages != ranks) {
    throw InvalidArgument(text(name, ": ", stages, " stages on ", ranks,
                               " ranks; it needs one stage a rank: give the pipeline ", stages,
                               " ranks, or cut the model into ", ranks, ranks == 1 ? " stage" : " stages"));
  }
  return begin(name, ranks, stages, microbatches);
}

// Makes the order of a schedule's actions by carrying them out: each rank does what it can, by a list of priorities.
class GreedySchedule {
 public:
  using Priorities = std::array<Kind, 3>;

  GreedySchedule(PipelineSchedule empty, int most_in_flight, const std::vector<PipelineCosts>& costs,
                 const Priorities& priorities)
      : schedule_(std::move(empty)),
        most_in_flight_(most_in_flight),
        costs_(costs),
        priorities_(priorities),
        done_(static_cast<std::size_t>(schedule_.stages())),
        free_at_(static_cast<std::size_t>(schedule_.ranks())) {}

  // Returns nothing where no rank can go on, since all keep as many microbatches as they may.
  std::optional<PipelineSchedule> finish() && {
    auto left = 3 * schedule_.stages() * schedule_.microbatches;
    while (left > 0) {
      const auto now = *std::ranges::min_element(free_at_);
      const auto before = left;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        if (free_at_[static_cast<std::size_t>(rank)] > now) continue;
        if (const auto action = next(rank)) {
          carry_out(rank, *action);
          --left;
        }
      }
      if (left == before && !wait(now)) return {};
    }
    return std::move(schedule_);
  }

 private:
  std::vector<double>& done(Kind kind, int stage) {
    return done_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(kind)];
  }

  // True where the stage's next action of this kind has its inputs.
  bool is_ready(Kind kind, int stage, double now) {
    const auto i = done(kind, stage).size();
    const auto has = [&](const std::vector<double>& passed) { return passed.size() > i && passed[i] <= now; };
    if (i == static_cast<std::size_t>(schedule_.microbatches)) return false;
    if (kind == Kind::backward_weight) return has(done(Kind::backward_input, stage));
    if (kind == Kind::forward) return stage == 0 || has(done(Kind::forward, stage - 1));
    return has(done(Kind::forward, stage)) &&
           (stage + 1 == schedule_.stages() || has(done(Kind::backward_input, stage + 1)));
  }

  std::optional<PipelineAction> next(int rank) {
    std::vector<int> mine;  // the last first
    for (int stage = schedule_.stages() - 1; stage >= 0; --stage) {
      if (schedule_.rank_of_stage[static_cast<std::size_t>(stage)] == rank) mine.push_back(stage);
    }
    int in_flight = 0;
    for (const int stage : mine)
      in_flight += static_cast<int>(done(Kind::forward, stage).size() - done(Kind::backward_weight, stage).size());
    for (const auto kind : priorities_) {
      for (std::size_t later = 0; later < mine.size(); ++later) {
        // An earlier stage leaves room for the later ones, or none of its microbatches could come to an end.
        if (kind == Kind::forward && in_flight + static_cast<int>(later) >= most_in_flight_) break;
        if (is_ready(kind, mine[later], free_at_[static_cast<std::size_t>(rank)])) {
          return PipelineAction{kind, mine[later], static_cast<int>(done(kind, mine[later]).size())};
        }
      }
    }
    return {};
  }

  void carry_out(int rank, const PipelineAction& action) {
    auto& now = free_at_[static_cast<std::size_t>(rank)];
    now += parallel::cost_of(action, costs_);
    done(action.kind, action.stage).push_back(now);
    schedule_.actions[static_cast<std::size_t>(rank)].push_back(action);
  }

  // Ranks that can do nothing now wait until another one has ended an action; returns whether one will.
  bool wait(double now) {
    auto until = std::numeric_limits<double>::infinity();
    for (const double free : free_at_) {
      if (free > now) until = std::min(until, free);
    }
    for (double& free : free_at_) {
      if (free <= now) free = until;
    }
    return until < std::numeric_limits<double>::infinity();
  }

  PipelineSchedule schedule_;
  const int most_in_flight_;
  const std::vector<PipelineCosts>& costs_;
  const Priorities priorities_;
  std::vector<std::array<std::vector<double>, 4>> done_;  // [stage][kind]: when microbatches have passed it, in order
  std::vector<double> free_at_;                           // [rank]
};

// The best of some orders. After the automatic scheduling of Qi et al. 2024, section 3.
PipelineSchedule best_order(const PipelineSchedule& empty, int most_in_flight,
                            const std::vector<PipelineCosts>& costs) {
  std::optional<PipelineSchedule> best;
  double least = 0;
  for (const auto& priorities :
       {GreedySchedule::Priorities{Kind::backward_input, Kind::forward, Kind::backward_weight},
        GreedySchedule::Priorities{Kind::forward, Kind::backward_input, Kind::backward_weight},
        GreedySchedule::Priorities{Kind::backward_input, Kind::backward_weight, Kind::forward},
        GreedySchedule::Priorities{Kind::forward, Kind::backward_weight, Kind::backward_input},
        GreedySchedule::Priorities{Kind::backward_weight, Kind::backward_input, Kind::forward},
        GreedySchedule::Priorities{Kind::backward_weight, Kind::forward, Kind::backward_input}}) {
    auto schedule = GreedySchedule(empty, most_in_flight, costs, priorities).finish();
    if (!schedule) continue;
    const auto total = predict_times(*schedule, costs).total;
    if (best && total >= least) continue;
    least = total;
    best = std::move(schedule);
  }
  if (!best) throw InvalidArgument(text(empty.name, ": no order was found"));
  return *best;
}

}  // namespace

PipelineSchedule gpipe(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& /*costs*/) {
  auto schedule = begin_one_stage_a_rank("gpipe", ranks, stages, microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    for (int i = 0; i < microbatches; ++i) actions.push_back({Kind::forward, rank, i});
    for (int i = 0; i < microbatches; ++i) actions.push_back({Kind::backward, rank, i});
  }
  return schedule;
}

PipelineSchedule one_forward_one_backward(int ranks, int stages, int microbatches,
                                          const std::vector<PipelineCosts>& /*costs*/) {
  auto schedule = begin_one_stage_a_rank("one_forward_one_backward", ranks, stages, microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    const int warm_up = std::min(ranks - 1 - rank, microbatches);
    for (int i = 0; i < warm_up; ++i) actions.push_back({Kind::forward, rank, i});
    for (int i = warm_up; i < microbatches; ++i) {
      actions.push_back({Kind::forward, rank, i});
      actions.push_back({Kind::backward, rank, i - warm_up});
    }
    for (int i = microbatches - warm_up; i < microbatches; ++i) actions.push_back({Kind::backward, rank, i});
  }
  return schedule;
}

PipelineSchedule interleaved(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& /*costs*/) {
  auto schedule = begin("interleaved", ranks, stages, microbatches);
  if (stages % ranks != 0 || microbatches % ranks != 0) {
    throw InvalidArgument(text("interleaved: ", stages, " stages and ", microbatches,
                               " microbatches; both must be multiples of the number of ranks, ", ranks));
  }
  const int chunks = stages / ranks, all = chunks * microbatches;
  for (int rank = 0; rank < ranks; ++rank) {
    // `ranks` microbatches go through the rank's first stage, then through its second one, ...
    const auto action = [&](Kind kind, int i) {
      const int chunk = i / ranks % chunks;
      const int stage = (kind == Kind::forward ? chunk : chunks - 1 - chunk) * ranks + rank;
      return PipelineAction{kind, stage, i / (ranks * chunks) * ranks + i % ranks};
    };
    auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    const int warm_up = std::min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, all);
    for (int i = 0; i < warm_up; ++i) actions.push_back(action(Kind::forward, i));
    for (int i = warm_up; i < all; ++i) {
      actions.push_back(action(Kind::forward, i));
      actions.push_back(action(Kind::backward, i - warm_up));
    }
    for (int i = all - warm_up; i < all; ++i) actions.push_back(action(Kind::backward, i));
  }
  return schedule;
}

PipelineSchedule zero_bubble(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& costs) {
  auto schedule = begin_one_stage_a_rank("zero_bubble", ranks, stages, microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    // This is one_forward_one_backward, with gradients of weights `rank` microbatches later than those of inputs.
    auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    const int warm_up = ranks - 1 - rank;
    for (int i = -warm_up; i < microbatches + rank; ++i) {
      if (i + warm_up < microbatches) actions.push_back({Kind::forward, rank, i + warm_up});
      if (i >= 0 && i < microbatches) actions.push_back({Kind::backward_input, rank, i});
      if (i - rank >= 0) actions.push_back({Kind::backward_weight, rank, i - rank});
    }
  }
  auto other = best_order(begin("zero_bubble", ranks, stages, microbatches), ranks, costs);
  return predict_times(other, costs).total < predict_times(schedule, costs).total ? other : schedule;
}

PipelineSchedule zero_bubble_v(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& costs) {
  auto schedule = begin("zero_bubble_v", ranks, stages, microbatches);
  if (stages != 2 * ranks) {
    throw InvalidArgument(text("zero_bubble_v: ", stages, " stages on ", ranks, " ranks; it needs two stages a rank"));
  }
  for (int stage = ranks; stage < stages; ++stage)
    schedule.rank_of_stage[static_cast<std::size_t>(stage)] = stages - 1 - stage;
  return best_order(schedule, 2 * ranks, costs);
}

}  // namespace schedules
}  // namespace lockstep
