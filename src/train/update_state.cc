#include "train/update_state.h"

#include <span>

#include "checkpoint/safetensors.h"
#include "strategy/replicated_state.h"
#include "strategy/unwrap.h"

namespace lockstep::train {
namespace {

constexpr const char *kModel = "model", *kOptimizer = "optimizer";

template <class Handle>
const auto& shared(const Handle& handle) {
  return internal::Unwrap::pointer(handle);
}

Trackable values(const ReplicatedModule& module, strategy::Values which) {
  return strategy::values_of(shared(module), which, strategy::Whose::of_this_worker);
}

}  // namespace

std::string print_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer) {
  Archive archive;
  const bool divided = unwrap(optimizer).completes_updates();
  if (!divided) values(module, strategy::Values::all).save(archive, kModel);
  (divided ? strategy::counters_of(shared(optimizer)) : optimizer.trackable()).save(archive, kOptimizer);
  return checkpoint::print_archive(archive);
}

void take_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, const std::string& printed) {
  const auto received = parse_state(printed);
  if (unwrap(optimizer).completes_updates()) {
    const auto change = strategy::counters_of(shared(optimizer)).load(received, kOptimizer);
    if (received.integer(std::string(kOptimizer) + "/iterations") > optimizer.iterations()) {
      unwrap(optimizer).complete_update();
    }
    return change();
  }
  const auto change_module = values(module, strategy::Values::all).load(received, kModel),
             change_optimizer = optimizer.trackable().load(received, kOptimizer);
  change_module();
  change_optimizer();
}

void save_for_newcomer(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, Archive& archive) {
  values(module, strategy::Values::untrained).save(archive, kModel);
  strategy::counters_of(shared(optimizer)).save(archive, kOptimizer);
}

std::function<void()> load_of_newcomer(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer,
                                       const Archive& archive) {
  const auto change_module = values(module, strategy::Values::untrained).load(archive, kModel),
             change_optimizer = strategy::counters_of(shared(optimizer)).load(archive, kOptimizer);
  return [change_module, change_optimizer] {
    change_module();
    change_optimizer();
  };
}

Archive parse_state(std::string_view printed) {
  return checkpoint::parse_archive("another worker's state", std::as_bytes(std::span(printed)));
}

}  // namespace lockstep::train
