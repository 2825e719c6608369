#include <algorithm>
#include <optional>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/pipeline_schedule.h"

namespace lockstep::schedules {
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
    throw InvalidArgument(text(name, ": ", stages, " stages on ", ranks, " ranks; it needs one stage a rank"));
  }
  return begin(name, ranks, stages, microbatches);
}

// What the ranks of a schedule have done so far, in steps of one unit of time.
class GreedySchedule {
 public:
  GreedySchedule(PipelineSchedule schedule, int most_in_flight)
      : schedule_(std::move(schedule)),
        most_in_flight_(most_in_flight),
        progress_(static_cast<std::size_t>(schedule_.stages())) {}

  PipelineSchedule finish() && {
    const auto actions = static_cast<std::size_t>(3 * schedule_.stages() * schedule_.microbatches);
    for (std::size_t done = 0; done < actions;) {
      std::vector<PipelineAction> now;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        if (const auto action = next(rank)) now.push_back(*action);
      }
      if (now.empty()) throw InvalidArgument(text(schedule_.name, ": no rank can go on"));
      for (const auto& action : now) carry_out(action);
      done += now.size();
    }
    return std::move(schedule_);
  }

 private:
  // Microbatches that have passed: they do so in order.
  struct Progress {
    int forward = 0, input = 0, weight = 0;
  };

  Progress& at(int stage) { return progress_[static_cast<std::size_t>(stage)]; }

  std::optional<PipelineAction> next(int rank) {
    std::vector<int> stages;  // the last first
    for (int stage = schedule_.stages() - 1; stage >= 0; --stage) {
      if (schedule_.rank_of_stage[static_cast<std::size_t>(stage)] == rank) stages.push_back(stage);
    }
    int in_flight = 0;
    for (const int stage : stages) in_flight += at(stage).forward - at(stage).weight;
    for (const int stage : stages) {
      const auto limit = stage + 1 == schedule_.stages() ? at(stage).forward : at(stage + 1).input;
      if (at(stage).input < std::min(limit, at(stage).forward))
        return PipelineAction{Kind::backward_input, stage, at(stage).input};
    }
    for (const int stage : stages) {
      const auto limit = stage == 0 ? schedule_.microbatches : at(stage - 1).forward;
      // An earlier stage leaves room for the later ones, or none of its microbatches could come to an end.
      const auto later = static_cast<int>(std::find(stages.begin(), stages.end(), stage) - stages.begin());
      if (at(stage).forward < limit && in_flight + later < most_in_flight_)
        return PipelineAction{Kind::forward, stage, at(stage).forward};
    }
    for (const int stage : stages) {
      if (at(stage).weight < at(stage).input) return PipelineAction{Kind::backward_weight, stage, at(stage).weight};
    }
    return {};
  }

  void carry_out(const PipelineAction& action) {
    auto& progress = at(action.stage);
    ++(action.kind == Kind::forward          ? progress.forward
       : action.kind == Kind::backward_input ? progress.input
                                             : progress.weight);
    schedule_.actions[static_cast<std::size_t>(schedule_.rank_of_stage[static_cast<std::size_t>(action.stage)])]
        .push_back(action);
  }

  PipelineSchedule schedule_;
  const int most_in_flight_;
  std::vector<Progress> progress_;  // [stage]
};

}  // namespace

PipelineSchedule gpipe(int ranks, int stages, int microbatches) {
  auto schedule = begin_one_stage_a_rank("gpipe", ranks, stages, microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    for (int i = 0; i < microbatches; ++i) actions.push_back({Kind::forward, rank, i});
    for (int i = 0; i < microbatches; ++i) actions.push_back({Kind::backward, rank, i});
  }
  return schedule;
}

PipelineSchedule one_forward_one_backward(int ranks, int stages, int microbatches) {
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

PipelineSchedule interleaved(int ranks, int stages, int microbatches) {
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

PipelineSchedule zero_bubble(int ranks, int stages, int microbatches) {
  auto schedule = begin_one_stage_a_rank("zero_bubble", ranks, stages, microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    // As one_forward_one_backward, with gradients of weights `rank` microbatches later than those of inputs.
    auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    const int warm_up = ranks - 1 - rank;
    for (int i = -warm_up; i < microbatches + rank; ++i) {
      if (i + warm_up < microbatches) actions.push_back({Kind::forward, rank, i + warm_up});
      if (i >= 0 && i < microbatches) actions.push_back({Kind::backward_input, rank, i});
      if (i - rank >= 0) actions.push_back({Kind::backward_weight, rank, i - rank});
    }
  }
  return schedule;
}

PipelineSchedule zero_bubble_v(int ranks, int stages, int microbatches) {
  auto schedule = begin("zero_bubble_v", ranks, stages, microbatches);
  if (stages != 2 * ranks) {
    throw InvalidArgument(text("zero_bubble_v: ", stages, " stages on ", ranks, " ranks; it needs two stages a rank"));
  }
  for (int stage = ranks; stage < stages; ++stage)
    schedule.rank_of_stage[static_cast<std::size_t>(stage)] = stages - 1 - stage;
  return GreedySchedule(std::move(schedule), 2 * ranks).finish();
}

}  // namespace lockstep::schedules
