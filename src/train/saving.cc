// Weights and full state on disk.
#include <cxxabi.h>
#include <torch/nn/module.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <typeinfo>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/atomic_file.h"
#include "checkpoint/files.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/sharded_archive.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_checkpoint.h"
#include "strategy/replicated_state.h"
#include "train/layers/stack.h"
#include "train/lead.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

constexpr const char* kTracker = "fit/tracker";

void save_history(const History& history, Archive& archive) {
  archive.set_numbers("fit/history/epochs", {history.epoch.begin(), history.epoch.end()});
  for (const auto& [name, values] : history.history) archive.set_numbers("fit/history/values/" + name, values);
}

History load_history(const Archive& archive) {
  History history;
  for (const double epoch : archive.numbers("fit/history/epochs")) history.epoch.push_back(static_cast<int>(epoch));
  const std::string prefix = "fit/history/values/";
  for (const auto& [name, line] : archive.entries) {
    if (name.starts_with(prefix)) history.history[name.substr(prefix.size())] = archive.numbers(name);
  }
  return history;
}

// Identifies callbacks by type and by their number among those of one type: callbacks of other types may be added or
// removed.
std::vector<std::string> callback_prefixes(const std::vector<AnyCallback>& callbacks) {
  std::map<std::string, int> seen;
  std::vector<std::string> prefixes;
  for (const auto& callback : callbacks) {
    const auto type = train::name_of_type(*callback.operator->());
    prefixes.push_back(text(ModelImpl::kCallback, "/", type, "/", seen[type]++));
  }
  return prefixes;
}

bool has_any(const Archive& archive, const std::string& prefix) {
  const auto begins = [&](const auto& all) {
    const auto first = all.lower_bound(prefix + "/");
    return first != all.end() && first->first.starts_with(prefix + "/");
  };
  return begins(archive.entries) || begins(archive.tensors);
}

}  // namespace

std::string train::name_of_type(const Callback& callback) {
  const char* const mangled = typeid(callback).name();
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(mangled, nullptr, nullptr, &failed),
                                                         &std::free);
  return failed == 0 ? name.get() : mangled;
}

void Model::save_weights(const std::string& path) const {
  impl_->require_built("save_weights");
  if (impl_->topology.is_newcomer()) return;  // the workers that it will join have saved, or will
  impl_->on_all_in_section("save_weights", [&] { impl_->write_weights(path); });
}

void ModelImpl::write_weights(const std::string& path) const {
  if (strategy::has_rows_on_servers(parameters->module(0))) {
    throw InvalidArgument(
        "save_weights: the rows of a ShardedEmbedding are on servers; save_checkpoint saves them, and so do the "
        "callbacks that write full checkpoints");
  }
  lead->write_weights(path);
}

// With parameter servers the chief reads the file, and the servers get its values.
void Model::load_weights(const std::string& path, const LoadWeightsOptions& options) {
  impl_->lead->once([&] { impl_->load_weights(impl_->read_for_all(path), options); });
}

Archive ModelImpl::save_weights() const {
  lead->fetch_before_saving();
  Archive archive;
  ReplicatedModule(parameters).trackable().save(archive, "");
  return archive;
}

Archive ModelImpl::from_chief(const Archive& archive) const {
  if (!parameters->is_split()) return archive;
  const auto printed = topology.all.broadcast(topology.all.rank() == 0 ? checkpoint::print_archive(archive) : "");
  return checkpoint::parse_archive("the chief's weights", std::as_bytes(std::span(printed)));
}

void ModelImpl::load_weights(Archive archive, const LoadWeightsOptions& options) {
  require_own("load_weights");
  if (parameters == nullptr) {
    train::require_free(layers, model_number);
    train::give_to(layers, model_number);
    pending_weights.emplace(std::move(archive), options);
    return;
  }
  train::load_weights(archive, options, parameters, [this] { lead->fetch(); });
  lead->tell_of_weights();
}

void Model::save_checkpoint(const std::string& path) const {
  impl_->require_built("save_checkpoint");
  impl_->require_compiled("save_checkpoint");
  if (impl_->topology.is_newcomer()) return;  // the workers that it will join have saved, or will
  impl_->on_all_in_section("save_checkpoint", [&] { impl_->lead->write_checkpoint(path); });
}

void Model::load_checkpoint(const std::string& path) {
  impl_->require_built("load_checkpoint");
  impl_->require_compiled("load_checkpoint");
  impl_->lead->load_checkpoint(path);
}

Archive ModelImpl::read_for_all(const std::string& path) {
  std::string bytes;
  on_all_in_section("reading a checkpoint", [&] { bytes = read_on_all(path); });
  return parse_read(path, bytes);
}

// Reads the file for all workers: others may not see the chief's disk.
std::string ModelImpl::read_on_all(const std::string& path) const {
  const auto file = checkpoint_file(path);
  std::string bytes;
  const auto read_on_chief = [&] {
    if (path.empty()) {
      throw InvalidArgument(
          "the path of the checkpoint is empty: latest_checkpoint returns \"\" where its folder has no checkpoint");
    }
    const auto read = checkpoint::read_file(file);
    bytes.assign(reinterpret_cast<const char*>(read.data()), read.size());
    if (checkpoint::file_exists(checkpoint::rows_folder(file))) {
      bytes = checkpoint::print_archive(checkpoint::ShardedArchive(file).whole());
    }
  };
  topology.all.run_on_rank_0(read_on_chief);
  return topology.all.broadcast(bytes);
}

Archive ModelImpl::parse_read(const std::string& path, const std::string& bytes) {
  return checkpoint::parse_archive(checkpoint_file(path), std::as_bytes(std::span(bytes)));
}

Archive ModelImpl::save_state() {
  auto archive = save_training();
  save_callbacks(archive);
  return archive;
}

void ModelImpl::save_callbacks(Archive& archive) const {
  const auto prefixes = callback_prefixes(callbacks);
  for (std::size_t i = 0; i < callbacks.size(); ++i) callbacks[i]->save(archive, prefixes[i]);
}

Archive ModelImpl::save_training() {
  Archive archive;
  ReplicatedModule(parameters).trackable().save(archive, "");
  ReplicatedOptimizer(gradients).trackable().save(archive, kOptimizer);
  save_progress(archive);
  save_replicas(archive);
  return archive;
}

void ModelImpl::save_replicas(Archive& archive) const {
  ReplicatedModule(parameters).replica_buffers().save(archive, kReplica);
  tracker->save_replicas(archive, kTracker);
}

Archive ModelImpl::save_small(bool weights_only) const {
  Archive archive;
  parameters->warn_of_difference();
  strategy::values_of(parameters, strategy::Values::untrained, strategy::Whose::of_all_workers).save(archive, "");
  if (weights_only) return archive;
  strategy::counters_of(gradients).save(archive, kOptimizer);
  save_progress(archive);
  save_replicas(archive);
  save_callbacks(archive);
  return archive;
}

void ModelImpl::save_progress(Archive& archive) const {
  archive.entries["seed"] = std::to_string(static_cast<std::int64_t>(seed));
  archive.entries["steps"] = std::to_string(steps);
  archive.entries["replicas"] = std::to_string(strategy.num_replicas_in_sync());
  archive.entries["fit/epoch"] = std::to_string(progress.epoch);
  archive.entries["fit/batch"] = std::to_string(progress.batch);
  archive.entries["fit/position/epoch"] = std::to_string(progress.position.epoch);
  archive.entries["fit/position/index"] = std::to_string(progress.position.index);
  archive.entries["fit/position/examples"] = std::to_string(progress.examples);
  archive.entries["fit/position/batch_size"] = std::to_string(progress.batch_size);
  archive.entries["fit/position/readers"] = std::to_string(progress.readers);
  save_history(progress.history, archive);
  tracker->save(archive, kTracker);
}

std::function<void()> ModelImpl::load_training(const Archive& archive) {
  if (!archive.entries.contains("steps")) {
    throw InvalidArgument("load_checkpoint: the file holds weights only; load_weights loads it");
  }
  train::check_weights(archive, *parameters);
  const auto change_weights = ReplicatedModule(parameters).trackable().load(archive, "");
  const auto change_buffers = ReplicatedModule(parameters).replica_buffers().load(archive, kReplica);
  const auto change_optimizer = ReplicatedOptimizer(gradients).trackable().load(archive, kOptimizer);
  const auto change_progress = load_progress(archive);
  if (archive.entries.contains("replicas") && archive.integer("replicas") != strategy.num_replicas_in_sync()) {
    log_warning(text("the checkpoint is of ", archive.entry("replicas"), " replicas and there are ",
                     strategy.num_replicas_in_sync(),
                     " now: each has its own random numbers and running statistics, so "
                     "the training goes on, but not with the same bits"));
  }
  return [change_weights, change_buffers, change_optimizer, change_progress] {
    change_weights();
    change_buffers();
    change_optimizer();
    change_progress();
  };
}

std::function<void()> ModelImpl::load_progress(const Archive& archive) {
  const auto number = [&](const char* name) { return archive.integer(name); };
  const train::FitProgress loaded{.epoch = static_cast<int>(number("fit/epoch")),
                                  .batch = number("fit/batch"),
                                  .position = {number("fit/position/epoch"), number("fit/position/index")},
                                  .examples = number("fit/position/examples"),
                                  .batch_size = number("fit/position/batch_size"),
                                  .readers = static_cast<int>(number("fit/position/readers")),
                                  .history = load_history(archive),
                                  .uncounted = parameter_server::steps_of(archive).uncounted};
  const auto loaded_seed = static_cast<std::uint64_t>(number("seed"));
  const auto loaded_steps = number("steps");
  const auto change_tracker = tracker->load(archive, kTracker);
  return [this, change_tracker, loaded_seed, loaded_steps, loaded] {
    change_tracker();
    seed = loaded_seed;
    steps = loaded_steps;
    progress = loaded;
    data_epochs = progress.position.epoch;
    if (!lead->has_servers_checkpoints()) count_uncounted();
  };
}

// Counts all steps of a checkpoint that was made with parameter servers, and is loaded without them.
void ModelImpl::count_uncounted() {
  for (const auto& results : std::exchange(progress.uncounted, {})) {
    tracker->add_sums(results);
    gradients->updater().count_step();
    ++steps;
    ++progress.batch;
    ++progress.position.index;
    progress.examples += progress.batch_size;
  }
}

void ModelImpl::load_state(const Archive& archive, const std::function<void()>& load_others) {
  const auto change = change_to(archive);
  if (load_others) load_others();
  change();
}

std::function<void()> ModelImpl::change_to(const Archive& archive) {
  const auto change_training = load_training(archive), change_callbacks = load_callbacks(archive);
  return [change_training, change_callbacks] {
    change_training();
    change_callbacks();
  };
}

std::function<void()> ModelImpl::load_callbacks(const Archive& archive) const {
  std::vector<std::function<void()>> changes;
  const auto prefixes = callback_prefixes(callbacks);
  for (std::size_t i = 0; i < callbacks.size(); ++i) {
    const bool mine = topology.all.rank() == 0 || !callbacks[i]->only_on_chief();
    if (mine && has_any(archive, prefixes[i])) changes.push_back(callbacks[i]->load(archive, prefixes[i]));
  }
  return [changes] {
    for (const auto& change : changes) change();
  };
}

}  // namespace lockstep
