#include "gradient/moving_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::gradient {

using nlohmann::json;

// Ranks send each other shards as JSON, whose library finds these functions by the type.
static void to_json(json& to, const Shard& shard) { to = {shard.slot, shard.begin, shard.count}; }
static void from_json(const json& from, Shard& shard) {
  shard = {from.at(0).get<std::size_t>(), from.at(1).get<std::int64_t>(), from.at(2).get<std::int64_t>()};
}

namespace {

constexpr std::size_t kNamed = 3;  // parameters in a message
constexpr const char* kSomePart = "a part of the optimizer's state";

// The newest version with which all can go on: no process has an older one alone. A process that has newer ones alone
// came with them, and has nothing of this one.
std::int64_t newest_of_all(const std::vector<std::map<std::int64_t, int>>& all) {
  std::set<std::int64_t> versions;
  for (const auto& of_process : all) {
    for (const auto& [version, rank] : of_process) versions.insert(version);
  }
  for (auto version = versions.rbegin(); version != versions.rend(); ++version) {
    const auto can_go_on = [&](const auto& of_process) {
      return of_process.empty() || of_process.contains(*version) || of_process.begin()->first > *version;
    };
    if (std::ranges::all_of(all, can_go_on)) return *version;
  }
  return *versions.begin();  // the oldest one always can
}

// Returns the newest version that any process has. Throws ClusterError where nobody has any.
std::int64_t newest_of_any(const std::vector<std::map<std::int64_t, int>>& all) {
  std::optional<std::int64_t> newest;
  for (const auto& versions : all) {
    if (!versions.empty()) newest = std::max(newest.value_or(0), versions.rbegin()->first);
  }
  if (newest) return *newest;
  throw ClusterError("all workers that had the state of the training were lost before this one got it");
}

bool has(const Shard& owned, const Shard& part) {
  return part.begin >= owned.begin && part.begin + part.count <= owned.begin + owned.count;
}

// Elements of state `index`, flat: a view of the values stored in `own` or `copies`. Throws Error where this process
// has neither.
at::Tensor state_in(const Updater::States& states, const Shard& part, std::size_t index) {
  for (const auto* const one : {&states.own, &states.copies}) {
    const auto owned = one->owned(part.slot);
    if (has(owned, part)) return one->state(part.slot, index).narrow(0, part.begin - owned.begin, part.count);
  }
  throw Error("elements of the optimizer's state that this process does not have");
}

}  // namespace

MovingState::MovingState(std::shared_ptr<ReplicatedParameters> parameters, Communicator ranks,
                         const Ownership& ownership, bool has_state, bool trains_apart)
    : parameters_(std::move(parameters)), ranks_(std::move(ranks)), trains_apart_(trains_apart) {
  if (has_state) place_ = Place{.version = 0, .rank = ranks_.rank(), .held = ownership.held()};
}

void MovingState::move(Updater& updater) {
  const at::NoGradGuard no_grad;
  const auto all = gather_versions();
  if (parameters_->topology().all.any(is_lost_)) return lose_state(updater, all, kSomePart);  // some do not know
  updater.ownership().is_sharded() ? divide_anew(updater, all) : copy_whole_state(updater, all);
}

// Processes that have the state have all of it, and keep it.
void MovingState::copy_whole_state(Updater& updater, const std::vector<Versions>& all) {
  newest_of_any(all);  // throws where nobody has it
  ShardsOfRanks had(all.size(), parameters_->trainable()), needed = had;
  for (std::size_t rank = 0; rank < all.size(); ++rank) (all[rank].empty() ? had : needed)[rank].clear();
  const auto has_none = [](const Versions& versions) { return versions.empty(); };
  const auto first = std::ranges::find_if_not(all, has_none) - all.begin();
  if (trains_apart_) std::fill(had.begin() + first + 1, had.end(), std::vector<Shard>());
  transfer(moves_between(had, needed).moves, updater.states(), updater.states());
  if (trains_apart_ && std::ranges::any_of(all, has_none)) {  // the number belongs to the state
    const auto iterations = ranks_.broadcast(std::to_string(updater.iterations()), static_cast<int>(first));
    if (!place_) updater.set_iterations(std::stoll(iterations));
  }
  if (!place_) parameters_->spread_first_copy();
  place_ = Place{.rank = ranks_.rank(), .held = {}};
}

void MovingState::divide_anew(Updater& updater, const std::vector<Versions>& all) {
  const auto next_version = newest_of_any(all) + 1;
  const auto version = newest_of_all(all);
  go_back_to(version, updater);
  const auto moves = moves_between(held_now(version, all), updater.ownership().held());
  const auto lost = moves.lost.empty() ? std::string() : names_of(moves.lost);
  // Where a model is split, others may have lost their part.
  if (parameters_->topology().all.any(!lost.empty())) return lose_state(updater, all, lost.empty() ? kSomePart : lost);
  auto states = updater.initial_states();
  transfer(moves.moves, updater.states(), states);
  updater.ownership().gather_values([this](at::ScalarType dtype) { return parameters_->flat(0, dtype); });
  parameters_->spread_first_copy();
  auto states_before = updater.exchange_states(std::move(states));
  if (place_) before_.emplace(std::move(*place_), std::move(states_before));
  place_ = Place{.version = next_version, .rank = ranks_.rank(), .held = updater.ownership().held()};
  ranks_.group().barrier(ranks_.deadline());
  before_.reset();
}

void MovingState::lose_state(Updater& updater, const std::vector<Versions>& all, const std::string& what) {
  const bool is_initial = updater.iterations() == 0;  // the same on all
  if (is_initial) {                                   // the state too
    const auto root = std::ranges::find_if_not(all, [](const auto& one) { return one.empty(); });
    broadcast(ranks_, {parameters_->flat(0, at::kFloat), parameters_->flat(0, at::kDouble)},
              static_cast<int>(root - all.begin()));
    parameters_->spread_first_copy();
  }
  updater.exchange_states(updater.initial_states());
  place_ = Place{.version = newest_of_any(all) + 1, .rank = ranks_.rank(), .held = updater.ownership().held()};
  before_.reset();
  is_lost_ = !is_initial;
  if (is_lost_) throw StateLost(text("workers were lost together that alone had ", what));
}

std::string MovingState::names_of(const std::vector<Shard>& lost) const {
  std::set<std::string> names;
  for (const auto& part : lost) names.insert(parameters_->slots()[part.slot].name);
  std::vector<std::string> first(names.begin(), names.end());
  if (first.size() > kNamed) {
    first.resize(kNamed);
    first.push_back(text(names.size() - kNamed, " more"));
  }
  return text(kSomePart, ", of ", join(first));
}

std::vector<MovingState::Versions> MovingState::gather_versions() const {
  Versions mine;
  if (place_) mine[place_->version] = place_->rank;
  if (before_) mine[before_->first.version] = before_->first.rank;
  std::vector<Versions> all;
  for (const auto& theirs : ranks_.all_gather(json(mine).dump())) all.push_back(json::parse(theirs).get<Versions>());
  return all;
}

void MovingState::go_back_to(std::int64_t version, Updater& updater) {
  if (before_ && before_->first.version == version) {
    updater.exchange_states(std::move(before_->second));
    place_ = std::move(before_->first);
  }
  if (place_ && place_->version != version) place_.reset();
  before_.reset();
}

// [rank]: what is there of the version.
ShardsOfRanks MovingState::held_now(std::int64_t version, const std::vector<Versions>& all) const {
  auto held = place_ ? place_->held : ShardsOfRanks();
  const auto has_none = [&](const Versions& versions) { return !versions.contains(version); };
  if (std::ranges::any_of(all, has_none)) {
    const auto root = std::ranges::find_if_not(all, has_none) - all.begin();
    held = json::parse(ranks_.broadcast(json(held).dump(), static_cast<int>(root))).get<ShardsOfRanks>();
  }
  ShardsOfRanks now;
  for (const auto& versions : all) {
    const auto found = versions.find(version);
    now.push_back(found == versions.end() ? std::vector<Shard>() : held.at(static_cast<std::size_t>(found->second)));
  }
  return now;
}

void MovingState::transfer(const std::vector<ShardMove>& moves, const Updater::States& from,
                           const Updater::States& to) const {
  const auto elements_of = [this](const Updater::States& states, const Shard& part) {
    std::vector<at::Tensor> elements;
    for (std::size_t i = 0; i < states.own.states(); ++i) elements.push_back(state_in(states, part, i));
    const auto& slot = parameters_->slots()[part.slot];
    elements.push_back(parameters_->flat(0, slot.dtype).narrow(0, slot.offset + part.begin, part.count));
    return elements;
  };
  carry_out(
      moves, ranks_, [&](const Shard& part) { return elements_of(from, part); },
      [&](const Shard& part) { return elements_of(to, part); });
}

std::vector<at::Tensor> copies_of_state(const Communicator& ranks, const Updater& updater, std::size_t index,
                                        const ShardsOfRanks& needed) {
  const auto& states = updater.states();
  std::vector<at::Tensor> copies;
  // The moves to a rank come in the order of what it needs, so each shard is a number of consecutive moves.
  std::size_t shard = 0;
  std::int64_t left = 0;
  const auto part_of_state = [&](const Shard& part) {
    const auto owned = shard_of(updater.ownership().own().owned(), part.slot);
    if (!has(owned, part)) return std::vector{state_in(states, part, index)};
    return std::vector{updater.state(part.slot, index).view({-1}).narrow(0, part.begin - owned.begin, part.count)};
  };
  const auto next_part_of_copies = [&](const Shard& part) {
    if (left == 0) {
      const auto& whole = needed[static_cast<std::size_t>(ranks.rank())][shard++];
      copies.push_back(at::empty({whole.count}, at::TensorOptions(states.own.dtype(whole.slot))));
      left = whole.count;
    }
    const auto place = copies.back().narrow(0, copies.back().numel() - left, part.count);
    left -= part.count;
    return std::vector{place};
  };
  carry_out(moves_between(updater.ownership().held(), needed).moves, ranks, part_of_state, next_part_of_copies);
  return copies;
}

}  // namespace lockstep::gradient
