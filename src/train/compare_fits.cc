#include "train/compare_fits.h"

#include <cstdlib>

#include "base/log.h"
#include "base/text.h"
#include "collective/refused_by_all.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/cluster.h"
#include "optimizer/describe.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/fit_options.h"

namespace lockstep::train {
namespace {

std::string shared_callbacks(const FitOptions& options) {
  std::string types;
  for (const auto& callback : options.callbacks) {
    if (!callback->only_on_chief()) types += text("callback ", name_of_type(*callback.operator->()), "\n");
  }
  return types;
}

}  // namespace

void compare_fits(const ModelImpl& impl, const Dataset& data, const FitOptions& options) {
  if (impl.topology.has_own_data()) {
    impl.topology.peers.check_all_agree(
        "fits", text("epochs ", options.epochs, "\ninitial_epoch ", options.initial_epoch, "\nsteps_per_epoch ",
                     options.steps_per_epoch, "\n", impl.parameters->describe_frozen()));
  } else if (impl.topology.peers.size() > 1) {
    impl.topology.peers.check_all_agree("fits",
                                        text(describe_fit(impl, data, options, impl.replicas()), "\n",
                                             impl.parameters->is_split() ? "" : impl.parameters->describe_frozen()));
    const bool trains = options.epochs > options.initial_epoch;
    if (trains && !strategy::first_element(data, impl.replicas()).x.defined())  // nor is there one on any other process
      throw collective::RefusedByAll(impl.topology.peers, "fit: the data set yielded no batch");
  }
}

void compare_callbacks(const ModelImpl& impl, const FitOptions& options) {
  if (impl.topology.all.size() > 1) impl.topology.all.check_all_agree("callbacks", shared_callbacks(options));
}

void compare_states(const Model& model) {
  const auto& impl = unwrap(model);
  if (!impl.topology.has_peers_with_own_models()) return;
  if (impl.topology.has_own_data()) {
    impl.topology.peers.check_all_agree(
        "first weights (give all those of one, by BroadcastGlobalVariablesCallback or broadcast_parameters)",
        impl.parameters->hashes());
  } else {
    impl.parameters->compare_copies(impl.topology.peers);
  }
  impl.topology.peers.check_all_agree(
      "starting points (broadcast what one restored at the beginning of the training)",
      text("step ", model.iterations(), "\nepoch ", impl.state.progress.epoch, "\nbatch ", impl.state.progress.batch));
}

std::string describe_member(const ModelImpl& impl, const Dataset& data, const FitOptions& options) {
  const auto& strategy = unwrap(impl.strategy);
  if (!strategy.workers().is_elastic()) return {};
  return text(strategy.describe(), "\n", impl.parameters->describe_whole(), "optimizer ",
              optimizer::describe(impl.gradients->updater().optimizer()), "\n",
              describe_fit(impl, data, options, impl.replicas()), "\n", shared_callbacks(options));
}

void warn_of_copies(const ModelImpl& impl) {
  if (impl.topology.peers.size() > 1 || impl.lead->needs_each_step()) return;
  try {
    const auto cluster = resolve_cluster([](const char* name) { return std::getenv(name); });
    if (cluster.world.size == 1) return;
    log_warning(text("fit: ", cluster.source, " started ", cluster.world.size, " processes, and this one (rank ",
                     cluster.world.rank, ") trains a model of its own: MultiWorkerMirroredStrategy, or an ",
                     "optimizer that takes the other processes' gradients too, trains one together"));
  } catch (const ClusterError&) {
    // Wrong variables of a launcher do not matter to a process that trains alone.
  }
}

}  // namespace lockstep::train
