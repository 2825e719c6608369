#include "lockstep/parallel/pipeline_schedule.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parallel/pipeline_costs.h"

namespace lockstep {
namespace {

using Kind = PipelineAction::Kind;

std::string say(const PipelineAction& action) {
  return text(name_of(action.kind), " of microbatch ", action.microbatch, " at stage ", action.stage);
}

[[noreturn]] void fail(const PipelineSchedule& schedule, const std::string& what) {
  throw InvalidArgument(text("schedule ", schedule.name, ": ", what));
}

using Key = std::tuple<Kind, int, int>;
Key key_of(const PipelineAction& action) { return {action.kind, action.stage, action.microbatch}; }

// Where each action stands: {rank, index}.
using Places = std::map<Key, std::pair<std::size_t, std::size_t>>;

Places places_of(const PipelineSchedule& schedule) {
  Places places;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const auto& actions = schedule.actions[rank];
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const auto& action = actions[i];
      if (action.stage < 0 || action.stage >= schedule.stages() || action.microbatch < 0 ||
          action.microbatch >= schedule.microbatches) {
        fail(schedule, text("rank ", rank, " has the ", say(action), ", of ", schedule.stages(), " stages and ",
                            schedule.microbatches, " microbatches"));
      }
      const auto owner = schedule.rank_of_stage[static_cast<std::size_t>(action.stage)];
      if (owner != static_cast<int>(rank))
        fail(schedule, text("rank ", rank, " has the ", say(action), ", a stage of rank ", owner));
      if (!places.try_emplace(key_of(action), rank, i).second)
        fail(schedule, text("the ", say(action), " is there twice"));
    }
  }
  return places;
}

void check_complete(const PipelineSchedule& schedule, const Places& places) {
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    for (int i = 0; i < schedule.microbatches; ++i) {
      const auto has = [&, s = stage](Kind kind) { return places.contains({kind, s, i}); };
      if (!has(Kind::forward)) fail(schedule, text("the ", say({Kind::forward, stage, i}), " is missing"));
      const bool whole = has(Kind::backward), input = has(Kind::backward_input), weight = has(Kind::backward_weight);
      if (whole && (input || weight))
        fail(schedule, text("the ", say({Kind::backward, stage, i}), " is there whole and in parts"));
      if (!whole && !input && !weight) fail(schedule, text("the ", say({Kind::backward, stage, i}), " is missing"));
      if (!whole && !input) fail(schedule, text("the ", say({Kind::backward_input, stage, i}), " is missing"));
      if (!whole && !weight) fail(schedule, text("the ", say({Kind::backward_weight, stage, i}), " is missing"));
    }
  }
}

// The actions that must end before this action.
std::vector<PipelineAction> needs(const PipelineSchedule& schedule, const Places& places,
                                  const PipelineAction& action) {
  const auto [kind, stage, microbatch] = action;
  if (kind == Kind::backward_weight) return {{Kind::backward_input, stage, microbatch}};
  if (kind == Kind::forward) {
    if (stage == 0) return {};
    return {{Kind::forward, stage - 1, microbatch}};
  }
  std::vector<PipelineAction> needed{{Kind::forward, stage, microbatch}};
  if (stage + 1 < schedule.stages()) {
    const auto next = places.contains({Kind::backward, stage + 1, microbatch}) ? Kind::backward : Kind::backward_input;
    needed.push_back({next, stage + 1, microbatch});
  }
  return needed;
}

double message_cost_of(const PipelineAction& action, const std::vector<PipelineCosts>& costs) {
  return costs.size() == 1 ? costs[0].message : costs.at(static_cast<std::size_t>(action.stage)).message;
}

class Simulation {
 public:
  Simulation(const PipelineSchedule& schedule, const std::vector<PipelineCosts>& costs)
      : schedule_(schedule), costs_(costs), places_(places_of(schedule)) {
    check_complete(schedule, places_);
    if (costs.size() != 1 && costs.size() != schedule.rank_of_stage.size())
      fail(schedule,
           text("there are costs of ", costs.size(), " stages; give one, or one for each of ", schedule.stages()));
    times_.of_actions.resize(schedule.actions.size());
  }

  PipelineTimes run() {
    while (advance()) {
    }
    double busy = 0;
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) {
      if (times_.of_actions[rank].size() < schedule_.actions[rank].size()) fail_deadlock();
      for (const auto& span : times_.of_actions[rank]) {
        times_.total = std::max(times_.total, span.end);
        busy += span.end - span.begin;
      }
    }
    if (times_.total > 0) times_.idle_share = 1 - busy / (times_.total * schedule_.ranks());
    return std::move(times_);
  }

 private:
  // Carries out what can be; returns whether anything was.
  bool advance() {
    bool any = false;
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) {
      auto& done = times_.of_actions[rank];
      while (done.size() < schedule_.actions[rank].size()) {
        const auto& action = schedule_.actions[rank][done.size()];
        const auto ready = ready_at(rank, action);
        if (!ready) break;
        const auto begin = std::max(*ready, done.empty() ? 0.0 : done.back().end);
        done.push_back({begin, begin + parallel::cost_of(action, costs_)});
        any = true;
      }
    }
    return any;
  }

  // The time when the action has its inputs; nothing while one is missing.
  std::optional<double> ready_at(std::size_t rank, const PipelineAction& action) const {
    double ready = 0;
    for (const auto& need : needs(schedule_, places_, action)) {
      const auto [where, index] = places_.at(key_of(need));
      if (times_.of_actions[where].size() <= index) return {};
      ready =
          std::max(ready, times_.of_actions[where][index].end + (where == rank ? 0 : message_cost_of(need, costs_)));
    }
    return ready;
  }

  [[noreturn]] void fail_deadlock() const {
    std::vector<std::string> waits;
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) {
      const auto done = times_.of_actions[rank].size();
      if (done == schedule_.actions[rank].size()) continue;
      const auto& action = schedule_.actions[rank][done];
      for (const auto& need : needs(schedule_, places_, action)) {
        const auto [where, index] = places_.at(key_of(need));
        if (times_.of_actions[where].size() > index) continue;
        waits.push_back(text("rank ", rank, "'s ", say(action), " waits for the ", say(need), ", which rank ", where,
                             " is to do later"));
        break;
      }
    }
    fail(schedule_, text("deadlock: ", join(waits, "; ")));
  }

  const PipelineSchedule& schedule_;
  const std::vector<PipelineCosts>& costs_;
  const Places places_;
  PipelineTimes times_;
};

// Returns a cell such as "F2'", where ' marks the rank's second stage.
std::string cell_of(const PipelineSchedule& schedule, const PipelineAction& action) {
  const auto rank = schedule.rank_of_stage[static_cast<std::size_t>(action.stage)];
  const auto before = std::count(schedule.rank_of_stage.begin(), schedule.rank_of_stage.begin() + action.stage, rank);
  return text("FBIW"[static_cast<std::size_t>(action.kind)], action.microbatch,
              std::string(static_cast<std::size_t>(before), '\''));
}

}  // namespace

const char* name_of(PipelineAction::Kind kind) {
  constexpr const char* kNames[] = {"forward", "backward", "backward_input", "backward_weight"};
  return kNames[static_cast<std::size_t>(kind)];
}

void check_schedule(const PipelineSchedule& schedule) { predict_times(schedule); }

PipelineTimes predict_times(const PipelineSchedule& schedule, const std::vector<PipelineCosts>& costs) {
  return Simulation(schedule, costs).run();
}

std::string draw_schedule(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  const auto times = predict_times(schedule, {costs});
  // A column stands for the shortest action.
  double unit = costs.forward;
  for (const double cost : {costs.backward_input, costs.backward_weight}) {
    if (cost > 0) unit = std::min(unit, cost);
  }
  if (!(unit > 0)) throw InvalidArgument("draw_schedule: the costs must be above 0");
  const auto column = [&](double time) { return static_cast<std::size_t>(std::lround(time / unit)); };
  std::size_t width = 0;
  for (const auto& actions : schedule.actions) {
    for (const auto& action : actions) width = std::max(width, cell_of(schedule, action).size() + 1);
  }
  std::string lines;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    std::string line(column(times.total) * width, ' ');
    for (std::size_t begin = 0; begin < line.size(); begin += width) line[begin] = '.';
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto& span = times.of_actions[rank][i];
      auto cell = cell_of(schedule, schedule.actions[rank][i]);
      cell.resize((column(span.end) - column(span.begin)) * width - 1, '-');
      line.replace(column(span.begin) * width, cell.size(), cell);
    }
    lines += text("rank ", rank, "  ", line, "\n");
  }
  return lines;
}

}  // namespace lockstep
