#include "strategy/replicated_state.h"

#include <vector>

#include "base/text.h"
#include "checkpoint/state.h"
#include "lockstep/base/error.h"
#include "lockstep/strategy/replicated.h"

namespace lockstep {
namespace {

constexpr const char *kModel = "model", *kOptimizer = "optimizer";

}  // namespace

std::string strategy::name_of_state(const StateSpec& state, const std::string& parameter) {
  return state.name + "/" + parameter;
}

void strategy::check_states(const Archive& archive, const std::string& prefix, const GradientPath& gradients) {
  constexpr std::size_t kMostNames = 10;  // that a message lists
  const auto& rule = gradients.updater().optimizer().rule();
  const auto states = rule.states();
  if (states.empty() || gradients.remote() != nullptr) return;  // servers have theirs
  std::vector<std::string> without;
  bool any_has = false;
  for (const auto& slot : gradients.parameters().slots()) {
    const auto name = name_of_state(states[0], slot.name);
    const bool has = archive.tensors.contains(checkpoint::joined(prefix, name));
    any_has = any_has || has;
    if (slot.trainable && !has) without.push_back(slot.name);
  }
  if (without.empty()) return;
  if (!any_has) {
    throw InvalidArgument(text("the checkpoint has no ", states[0].name, ", which the optimizer ", rule.name(),
                               " keeps here: it was saved with other options of the optimizer, or while all parameters "
                               "were frozen. To go on with that training, compile likewise. To begin the optimizer "
                               "anew, load the weights alone: by load_weights, or, of a Checkpoint, the module"));
  }
  const auto more = without.size() > kMostNames ? without.size() - kMostNames : 0;
  without.resize(without.size() - more);
  throw InvalidArgument(
      text("the checkpoint has no state of the optimizer ", rule.name(), " for ", join(without),
           more > 0 ? text(" and ", more, " more") : "",
           ", which are trained here, and were frozen when it was saved. To go on with that training, freeze them "
           "(requires_grad_(false)), call compile, and load the checkpoint. To train them too, load the weights alone: "
           "by load_weights, or, of a Checkpoint, the module; the optimizer then begins anew"));
}

Trackable strategy::update_of(const std::shared_ptr<ReplicatedParameters>& parameters,
                              const std::shared_ptr<GradientPath>& gradients) {
  if (gradients->outer_step() != nullptr) return checkpoint::compose({});  // each worker's updates are its own
  if (!gradients->completes_updates()) {
    return checkpoint::compose({{kModel, values_of(parameters, Values::all, Whose::of_this_worker)},
                                {kOptimizer, ReplicatedOptimizer(gradients).trackable()}});
  }
  auto counters = counters_of(gradients);
  counters.load = [gradients, load = counters.load](const Archive& archive,
                                                    const std::string& prefix) -> std::function<void()> {
    const auto iterations = archive.integer(checkpoint::joined(prefix, "iterations"));
    return [gradients, iterations, change = load(archive, prefix)] {
      if (iterations > gradients->updater().iterations()) gradients->complete_update();
      change();
    };
  };
  return checkpoint::compose({{kOptimizer, counters}});
}

Trackable strategy::newcomers_part_of(const std::shared_ptr<ReplicatedParameters>& parameters,
                                      const std::shared_ptr<GradientPath>& gradients) {
  checkpoint::Parts parts{{kModel, values_of(parameters, Values::untrained, Whose::of_this_worker)},
                          {kOptimizer, counters_of(gradients)}};
  if (auto* const outer = gradients->outer_step()) parts.emplace_back("outer", outer->counts());
  return checkpoint::compose(std::move(parts));
}

}  // namespace lockstep
