#include "train/model_state.h"

#include <c10/util/Type.h>

#include <map>
#include <memory>
#include <typeinfo>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/state.h"
#include "lockstep/base/error.h"
#include "strategy/replicated_state.h"
#include "train/layers/stack.h"
#include "train/lead.h"
#include "train/model_impl.h"

namespace lockstep {

std::string train::name_of_type(const Callback& callback) { return c10::demangle(typeid(callback).name()); }

void Model::save_weights(const std::string& path) const {
  impl_->require_built("save_weights");
  if (impl_->topology.is_newcomer()) return;  // the workers that it will join have saved, or will
  impl_->on_all_in_section("save_weights", [&] { impl_->lead->write({.path = path, .weights_only = true}); });
}

// With parameter servers the chief reads the file, and the servers get its values.
void Model::load_weights(const std::string& path, const LoadWeightsOptions& options) {
  impl_->lead->once([&] { impl_->state.load_weights(impl_->state.read(path), options); });
}

void Model::save_checkpoint(const std::string& path) const {
  impl_->require_built("save_checkpoint");
  impl_->require_compiled("save_checkpoint");
  if (impl_->topology.is_newcomer()) return;  // the workers that it will join have saved, or will
  impl_->on_all_in_section("save_checkpoint", [&] { impl_->lead->write({.path = path}); });
}

void Model::load_checkpoint(const std::string& path) {
  impl_->require_built("load_checkpoint");
  impl_->require_compiled("load_checkpoint");
  impl_->lead->load_checkpoint(path);
}

namespace train {
namespace {

using checkpoint::joined;

constexpr const char* kFit = "fit";
constexpr const char* kTracker = "fit/tracker";

void save_history(const History& history, Archive& archive, const std::string& prefix) {
  archive.set_numbers(joined(prefix, "epochs"), {history.epoch.begin(), history.epoch.end()});
  for (const auto& [name, values] : history.history) {
    archive.set_numbers(joined(prefix, "values/" + name), values);
  }
}

History load_history(const Archive& archive, const std::string& prefix) {
  History history;
  for (const double epoch : archive.numbers(joined(prefix, "epochs"))) {
    history.epoch.push_back(static_cast<int>(epoch));
  }
  const auto values = joined(prefix, "values/");
  for (const auto& [name, line] : archive.entries) {
    if (name.starts_with(values)) history.history[name.substr(values.size())] = archive.numbers(name);
  }
  return history;
}

Trackable track_seed(std::uint64_t& seed) {
  return {[&seed](Archive& archive, const std::string& prefix) {
            archive.entries[prefix] = std::to_string(static_cast<std::int64_t>(seed));
          },
          [&seed](const Archive& archive, const std::string& prefix) -> std::function<void()> {
            return [&seed, loaded = static_cast<std::uint64_t>(archive.integer(prefix))] { seed = loaded; };
          }};
}

// A part that is saved, and that another part loads.
std::function<void()> nothing_to_load(const Archive&, const std::string&) {
  return [] {};
}

bool has_any(const Archive& archive, const std::string& prefix) {
  const auto begins = [&](const auto& all) {
    const auto first = all.lower_bound(prefix + "/");
    return first != all.end() && first->first.starts_with(prefix + "/");
  };
  return begins(archive.entries) || begins(archive.tensors);
}

}  // namespace

// --- parts

Trackable ModelState::variables() const {
  auto values = ReplicatedModule(impl_.parameters).trackable();
  values.load = [parameters = impl_.parameters](const Archive& archive, const std::string&) {
    return change_weights(archive, {}, parameters);
  };
  return values;
}

Trackable ModelState::optimizer() const { return ReplicatedOptimizer(impl_.gradients).trackable(); }

Trackable ModelState::fit_progress() {
  const auto replicas = [this](Archive& archive, const std::string& prefix) {
    archive.entries[prefix] = std::to_string(impl_.strategy.num_replicas_in_sync());
  };
  const auto save_tracker = [this](Archive& archive, const std::string& prefix) { tracker->save(archive, prefix); };
  const auto load_tracker = [this](const Archive& archive, const std::string& prefix) {
    return tracker->load(archive, prefix);
  };
  return checkpoint::compose({{kFit, place()},
                              {"seed", track_seed(seed)},
                              {"steps", track(steps)},
                              {"replicas", {replicas, nothing_to_load}},
                              {kTracker, {save_tracker, load_tracker}}});
}

Trackable ModelState::place() {
  const auto save = [this](Archive& archive, const std::string& prefix) {
    const auto set = [&](const char* name, auto value) { archive.entries[joined(prefix, name)] = text(value); };
    set("epoch", progress.epoch);
    set("batch", progress.batch);
    set("position/epoch", progress.position.epoch);
    set("position/index", progress.position.index);
    set("position/examples", progress.examples);
    set("position/batch_size", progress.batch_size);
    set("position/readers", progress.readers);
    save_history(progress.history, archive, joined(prefix, "history"));
  };
  const auto load = [this](const Archive& archive, const std::string& prefix) -> std::function<void()> {
    const auto number = [&](const char* name) { return archive.integer(joined(prefix, name)); };
    const FitProgress loaded{.epoch = static_cast<int>(number("epoch")),
                             .batch = number("batch"),
                             .position = {number("position/epoch"), number("position/index")},
                             .examples = number("position/examples"),
                             .batch_size = number("position/batch_size"),
                             .readers = static_cast<int>(number("position/readers")),
                             .history = load_history(archive, joined(prefix, "history")),
                             .uncounted = checkpoint::uncounted_steps(archive)};
    return [this, loaded] {
      progress = loaded;
      data_epochs = progress.position.epoch;
    };
  };
  return {save, load};
}

// The tracker loads its replicas' sums with the sums of all.
Trackable ModelState::replicas() const {
  const auto save_sums = [this](Archive& archive, const std::string& prefix) {
    tracker->save_replicas(archive, prefix);
  };
  return checkpoint::compose(
      {{kReplica, ReplicatedModule(impl_.parameters).replica_buffers()}, {kTracker, {save_sums, nothing_to_load}}});
}

// Identifies callbacks by type and by their number among those of one type: callbacks of other types may be added or
// removed.
Trackable ModelState::state_of_callbacks() const {
  std::map<std::string, int> seen;
  checkpoint::Parts parts;
  for (const auto& callback : callbacks) {
    const auto type = name_of_type(*callback.operator->());
    const auto save = [callback](Archive& archive, const std::string& prefix) { callback->save(archive, prefix); };
    const auto load = [this, callback](const Archive& archive, const std::string& prefix) -> std::function<void()> {
      const bool mine = impl_.topology.all.rank() == 0 || !callback->only_on_chief();
      return mine && has_any(archive, prefix) ? callback->load(archive, prefix) : [] {};
    };
    parts.emplace_back(text(type, "/", seen[type]++), Trackable{save, load});
  }
  return checkpoint::compose({{kCallback, checkpoint::compose(std::move(parts))}});
}

// --- selections

Trackable ModelState::weights() const {
  auto state = variables();
  state.save = [this, save = state.save](Archive& archive, const std::string& prefix) {
    impl_.lead->fetch_before_saving();
    save(archive, prefix);
  };
  return state;
}

Trackable ModelState::training() {
  auto state =
      checkpoint::compose({{"", variables()}, {kOptimizer, optimizer()}, {"", fit_progress()}, {"", replicas()}});
  state.load = [this, load = state.load](const Archive& archive, const std::string& prefix) {
    if (!archive.entries.contains("steps")) {
      throw InvalidArgument("load_checkpoint: the file holds weights only; load_weights loads it");
    }
    auto change = load(archive, prefix);
    const auto replicas = impl_.strategy.num_replicas_in_sync();
    if (archive.entries.contains("replicas") && archive.integer("replicas") != replicas) {
      log_warning(text("the checkpoint is of ", archive.entry("replicas"), " replicas and there are ", replicas,
                       " now: each has its own random numbers and running statistics, so "
                       "the training goes on, but not with the same bits"));
    }
    return change;
  };
  return state;
}

Trackable ModelState::all() { return checkpoint::compose({{"", training()}, {"", state_of_callbacks()}}); }

Trackable ModelState::of_file(bool weights_only) { return weights_only ? weights() : all(); }

Trackable ModelState::small_of_file(bool weights_only) {
  checkpoint::Parts parts{
      {"", strategy::values_of(impl_.parameters, strategy::Values::untrained, strategy::Whose::of_all_workers)}};
  if (!weights_only) {
    parts.emplace_back(kOptimizer, strategy::counters_of(impl_.gradients));
    parts.emplace_back("", fit_progress());
    parts.emplace_back("", replicas());
    parts.emplace_back("", state_of_callbacks());
  }
  return checkpoint::compose(std::move(parts));
}

Trackable ModelState::of_fit() { return checkpoint::compose({{"", fit_progress()}, {"", state_of_callbacks()}}); }

Trackable ModelState::beside_servers() {
  return checkpoint::compose(
      {{"seed", track_seed(seed)},
       {"", strategy::values_of(impl_.parameters, strategy::Values::untrained, strategy::Whose::of_this_worker)}});
}

// --- sources

Archive ModelState::read(const std::string& path) const {
  Archive archive;
  impl_.on_all_in_section("reading a checkpoint",
                          [&] { archive = checkpoint::read_for_all(path, impl_.topology.all); });
  return archive;
}

std::function<void()> ModelState::read_all(const std::string& path) {
  std::function<void()> change;
  std::exception_ptr refused;  // perhaps on this worker alone: the others wait for it at the section's end
  impl_.on_all_in_section("reading a checkpoint", [&] {
    refused = nullptr;
    const auto archive = checkpoint::read_for_all(path, impl_.topology.all);
    try {
      change = all().load(archive, "");
    } catch (const InvalidArgument&) {
      refused = std::current_exception();
    } catch (const DataError&) {
      refused = std::current_exception();
    }
  });
  if (refused) std::rethrow_exception(refused);
  return [this, change] {
    change();
    count_uncounted();
  };
}

// Counts all steps of a checkpoint that was made with parameter servers.
void ModelState::count_uncounted() {
  for (const auto& results : std::exchange(progress.uncounted, {})) {
    tracker->add_sums(results);
    impl_.gradients->updater().count_step();
    ++steps;
    ++progress.batch;
    ++progress.position.index;
    progress.examples += progress.batch_size;
  }
}

Archive ModelState::from_chief(const Archive& archive) const {
  if (!impl_.parameters->is_split()) return archive;
  return checkpoint::from_rank_0("the chief's weights", archive, impl_.topology.all);
}

void ModelState::load_weights(Archive archive, const LoadWeightsOptions& options) {
  impl_.require_own("load_weights");
  if (impl_.parameters == nullptr) {
    require_free(impl_.definition.layers, impl_.definition.number);
    give_to(impl_.definition.layers, impl_.definition.number);
    pending_weights.emplace(std::move(archive), options);
    return;
  }
  change_weights(archive, options, impl_.parameters, [this] { impl_.lead->fetch(); })();
  impl_.lead->tell_of_weights();
}

}  // namespace train
}  // namespace lockstep
