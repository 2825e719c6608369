// The calls of custom loops on modules and optimizers, and how both are saved.
#include "lockstep/strategy/replicated.h"

#include <torch/nn/module.h>

#include <cmath>
#include <cstring>
#include <set>
#include <span>
#include <sstream>

#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state.h"
#include "data/stored_tensor.h"
#include "gradient/gradient_path.h"
#include "lockstep/base/error.h"
#include "lockstep/strategy/strategy.h"
#include "strategy/replicated_state.h"
#include "strategy/state_apart.h"

namespace lockstep {
namespace {

using checkpoint::joined;

constexpr const char* kSeen = "examples";  // of each replica, beside its buffers

// Returns the deadline for devices that run compiled programs: they may take as long as other replicas.
Deadline for_devices() { return Deadline::after(std::chrono::duration<double>(kDefaultTimeoutSeconds)); }

// Returns the stored tensor in this shape. Throws InvalidArgument naming what differs.
Tensor load_tensor(const Archive& archive, const std::string& name, at::IntArrayRef sizes, at::ScalarType wanted) {
  const auto loaded = data::from_stored(archive.tensor(name));
  if (loaded.sizes() != sizes) {
    throw InvalidArgument(
        text("the checkpoint's \"", name, "\" has shape ", loaded.sizes(), "; the model's has ", sizes));
  }
  const auto found = loaded.scalar_type();
  const bool of_before = (wanted == at::kBool && found == at::kByte) ||  // as earlier versions stored them
                         ((wanted == at::kChar || wanted == at::kShort) && found == at::kInt);
  const bool widens =
      (found == at::kHalf || found == at::kBFloat16) && (wanted == at::kFloat || wanted == at::kDouble);  // exactly
  if (found != wanted && !of_before && !widens) {
    throw InvalidArgument(text("the checkpoint's \"", name, "\" has dtype ", found, "; the model's has ", wanted));
  }
  return loaded.to(wanted);
}

Tensor load_like(const Archive& archive, const std::string& name, const Tensor& like) {
  return load_tensor(archive, name, like.sizes(), like.scalar_type());
}

// Loads this process's part of a parameter, or of a state of the optimizer for it.
Tensor load_slot(const Archive& archive, const std::string& name, const ReplicatedParameters& parameters,
                 std::size_t slot) {
  const auto dtype = parameters.slots()[slot].dtype;
  return parameters.part_of(slot, load_tensor(archive, name, parameters.whole_sizes(slot), dtype));
}

// Returns the archives of all workers as one, on the chief, where a model is split: each has saved what it has.
Archive gathered_on_chief(const Communicator& workers, Archive mine) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : mine.tensors) lines.push_back(name);
  std::set<std::string> elsewhere;  // on a worker before this one
  int rank = 0;
  for (const auto& theirs : workers.all_gather(join(lines, "\n"))) {
    if (rank++ == workers.rank()) break;
    std::istringstream names(theirs);
    for (std::string name; std::getline(names, name);) elsewhere.insert(name);
  }
  std::erase_if(mine.tensors, [&](const auto& each) { return elsewhere.contains(each.first); });
  const auto packed = workers.gather(workers.rank() == 0 ? "" : checkpoint::print_archive(mine), 0);
  if (workers.rank() != 0) return {};
  for (std::size_t other = 1; other < packed.size(); ++other) {
    auto theirs = checkpoint::parse_archive("a worker's state", std::as_bytes(std::span(packed[other])));
    mine.tensors.merge(theirs.tensors);
    mine.entries.merge(theirs.entries);
  }
  return mine;
}

// Calls save(archive); where a model is split, joins what all workers save in the chief's archive.
void save_with_parts(const ReplicatedParameters& parameters, Archive& archive,
                     const std::function<void(Archive&)>& save) {
  if (!parameters.is_split()) return save(archive);
  Archive mine;
  save(mine);
  mine = gathered_on_chief(parameters.topology().all, std::move(mine));
  archive.tensors.merge(mine.tensors);
  archive.entries.merge(mine.entries);
}

// Saves a slot's whole tensor, of which `part` is here; where a model is split, on one of the workers that have it.
void save_slot(const ReplicatedParameters& parameters, std::size_t slot, const Tensor& part, Archive& archive,
               const std::string& name) {
  if (parameters.is_split() && parameters.topology().gradients.rank() != 0) return;
  const auto whole = parameters.whole(slot, part);
  if (!parameters.is_split() || parameters.is_first_holder(slot)) archive.tensors[name] = data::to_stored(whole);
}

}  // namespace

void ReplicatedModule::fetch() const { impl_->fetch(for_devices()); }

void ReplicatedModule::train(bool on) const {
  for (int replica = 0; replica < impl_->replicas(); ++replica) impl_->module(replica).train(on);
}

Trackable ReplicatedModule::trackable() const {
  return strategy::values_of(impl_, strategy::Values::all, strategy::Whose::of_all_workers);
}

Trackable strategy::values_of(const std::shared_ptr<ReplicatedParameters>& parameters, Values values, Whose whose,
                              const std::set<std::string>& left) {
  const auto each = [parameters, values](const auto& visit) {
    for (std::size_t i = 0; i < parameters->slots().size(); ++i) {
      const auto& slot = parameters->slots()[i];
      if (values == Values::all || !slot.trainable) visit(i, slot.name);
    }
  };
  const bool of_all = whose == Whose::of_all_workers;
  const auto save = [parameters, each, of_all](Archive& archive, const std::string& prefix) {
    if (of_all) parameters->check_save();
    parameters->fetch(for_devices());
    const auto save_own = [&](Archive& mine) {
      each([&](std::size_t slot, const std::string& name) {
        const auto& value = parameters->parameter(0, slot);
        if (of_all)
          save_slot(*parameters, slot, value, mine, joined(prefix, name));
        else
          mine.tensors[joined(prefix, name)] = data::to_stored(value);
      });
      const auto averages = of_all ? parameters->average_buffers() : parameters->average_own_buffers();
      for (std::size_t i = 0; i < averages.size(); ++i)
        mine.tensors[joined(prefix, parameters->buffer_names()[i])] = data::to_stored(averages[i]);
    };
    of_all ? save_with_parts(*parameters, archive, save_own) : save_own(archive);
  };
  const auto load = [parameters, each, of_all, left](const Archive& archive,
                                                     const std::string& prefix) -> std::function<void()> {
    std::vector<std::pair<std::size_t, Tensor>> loaded, loaded_buffers;
    each([&](std::size_t slot, const std::string& name) {
      if (left.contains(name)) return;
      const auto stored = joined(prefix, name);
      loaded.emplace_back(slot, of_all ? load_slot(archive, stored, *parameters, slot)
                                       : load_like(archive, stored, parameters->parameter(0, slot)));
    });
    for (std::size_t i = 0; i < parameters->buffer_names().size(); ++i) {
      if (left.contains(parameters->buffer_names()[i])) continue;
      const auto name = joined(prefix, parameters->buffer_names()[i]);
      loaded_buffers.emplace_back(i, load_like(archive, name, parameters->buffer(0, i)));
    }
    return [parameters, loaded, loaded_buffers] {
      for (const auto& [slot, value] : loaded) parameters->assign(slot, value);
      for (const auto& [index, value] : loaded_buffers) parameters->assign_buffer(index, value);
      parameters->forget_seen();
    };
  };
  return {save, load, parameters->topology().all};
}

Trackable ReplicatedModule::replica_buffers() const {
  const auto name_of = [parameters = impl_](const std::string& prefix, int replica, std::size_t index) {
    return joined(prefix, text(replica, "/", parameters->buffer_names()[index]));
  };
  // Saves all replicas' buffers, numbered through. Collective over the workers.
  const auto save_own = [parameters = impl_, name_of](Archive& archive, const std::string& prefix) {
    parameters->fetch(for_devices());
    const auto& workers = parameters->topology().tokens;
    const int replicas = parameters->replicas();
    archive.entries[joined(prefix, "replicas")] = std::to_string(replicas * workers.size());
    archive.set_numbers(joined(prefix, kSeen), parameters->seen_by_all());
    for (std::size_t i = 0; i < parameters->buffer_names().size(); ++i) {
      auto stored = data::to_stored(parameters->buffer(0, i));
      const auto bytes = stored.bytes.size();
      std::string mine;
      for (int replica = 0; replica < replicas; ++replica) {
        const auto own = data::to_stored(parameters->buffer(replica, i)).bytes;
        mine.append(reinterpret_cast<const char*>(own.data()), own.size());
      }
      const auto all = join(workers.all_gather(mine), "");
      for (int replica = 0; replica < replicas * workers.size(); ++replica) {
        std::memcpy(stored.bytes.data(), all.data() + static_cast<std::size_t>(replica) * bytes, bytes);
        archive.tensors[name_of(prefix, replica, i)] = stored;
      }
    }
  };
  const auto save = [parameters = impl_, save_own](Archive& archive, const std::string& prefix) {
    save_with_parts(*parameters, archive, [&](Archive& mine) { save_own(mine, prefix); });
  };
  const auto load = [parameters = impl_, name_of](const Archive& archive,
                                                  const std::string& prefix) -> std::function<void()> {
    const auto& workers = parameters->topology().tokens;
    const int all = parameters->replicas() * workers.size(), first = parameters->replicas() * workers.rank();
    if (archive.entry(joined(prefix, "replicas")) != std::to_string(all)) return [] {};
    // Files of earlier versions do not have this entry.
    const auto name_of_seen = joined(prefix, kSeen);
    auto seen = archive.entries.contains(name_of_seen) ? archive.numbers(name_of_seen) : std::vector<double>();
    seen.resize(static_cast<std::size_t>(all));
    std::vector<std::vector<Tensor>> values(static_cast<std::size_t>(parameters->replicas()));
    for (int replica = 0; replica < parameters->replicas(); ++replica) {
      for (std::size_t i = 0; i < parameters->buffer_names().size(); ++i) {
        values[static_cast<std::size_t>(replica)].push_back(
            load_like(archive, name_of(prefix, first + replica, i), parameters->buffer(replica, i)));
      }
    }
    return [parameters, values, seen, first] {
      for (int replica = 0; replica < parameters->replicas(); ++replica) {
        parameters->set_seen(replica, seen[static_cast<std::size_t>(first + replica)]);
        const auto& own = values[static_cast<std::size_t>(replica)];
        for (std::size_t i = 0; i < own.size(); ++i) parameters->assign_buffer_of(replica, i, own[i]);
      }
    };
  };
  return {save, load, impl_->topology().all};
}

void ReplicatedOptimizer::minimize(const ReplicaContext& replica, const Tensor& loss, double weight) const {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    throw InvalidArgument(text("minimize: the loss ",
                               !loss.defined()     ? text("is undefined")
                               : loss.numel() != 1 ? text("has shape ", loss.sizes())
                                                   : text("depends on no trainable parameter"),
                               "; it must be a scalar with a gradient: the sum over this replica's examples"));
  }
  try {
    if (ops::current_trace() == nullptr) impl_->expect_one_backward(replica.local_replica_id());
    scale_loss(loss).backward();
  } catch (...) {
    if (ops::current_trace() == nullptr)
      impl_->drop_gradients(replica.local_replica_id());  // else the next step would add to them
    throw;
  }
  apply_gradients(replica, weight);
}

void ReplicatedOptimizer::apply_gradients(const ReplicaContext& replica, double weight) const {
  impl_->apply(replica.local_group(), weight, replica.deadline());
  if (ops::current_trace() == nullptr) impl_->parameters().count_examples(replica.local_replica_id(), weight);
}

Tensor ReplicatedOptimizer::scale_loss(const Tensor& loss) const {
  return impl_->updater().loss_scale().value() == 1 ? loss : loss * impl_->updater().loss_scale().value();
}

void ReplicatedOptimizer::meet() const { impl_->meet(); }
double ReplicatedOptimizer::loss_scale() const { return impl_->updater().loss_scale().value(); }
std::int64_t ReplicatedOptimizer::iterations() const { return impl_->updater().iterations(); }
std::int64_t ReplicatedOptimizer::state_bytes() const { return impl_->updater().state_bytes(); }
double ReplicatedOptimizer::learning_rate() const { return impl_->updater().learning_rate(); }
void ReplicatedOptimizer::set_learning_rate(double rate) const { impl_->updater().set_learning_rate(rate); }

namespace {

// Where a model is split, each worker numbers its slots by itself, and has an entry of its own.
std::string name_of_order(const ReplicatedParameters& parameters) {
  if (!parameters.is_split() || parameters.slots().empty()) return "gradient_order";
  return "gradient_order/" + parameters.slots()[0].name;
}

// Reads the counters, and returns what restores them.
std::function<void()> load_counters(const std::shared_ptr<GradientPath>& gradients, const Archive& archive,
                                    const std::string& prefix) {
  const auto& rule = archive.entry(joined(prefix, "rule"));
  const auto& expected = gradients->updater().optimizer().rule().name();
  if (rule != expected) {
    throw InvalidArgument(text("the checkpoint's optimizer is ", rule, "; this one is ", expected));
  }
  const auto iterations = archive.integer(joined(prefix, "iterations"));
  std::optional<double> learning_rate;
  if (const auto name = joined(prefix, "learning_rate"); archive.entries.contains(name))
    learning_rate = LearningRate(archive.number(name)).at(0);  // checked
  gradient::Reduction::State sums;
  const auto listed = archive.entries.find(joined(prefix, name_of_order(gradients->parameters())));
  if (listed != archive.entries.end()) {
    std::istringstream numbers(listed->second);
    for (std::int64_t slot = 0; numbers >> slot;) sums.order.push_back(slot);
  }
  for (const auto* const name : {"weight_scale", "usual_weight"}) {  // the second in files of earlier versions
    if (archive.entries.contains(joined(prefix, name))) sums.weight_scale = archive.number(joined(prefix, name));
  }
  std::optional<double> scale;
  std::int64_t steps = 0, skipped = 0;  // of the scale
  if (const auto name = joined(prefix, "loss_scale"); archive.entries.contains(name)) {
    scale = archive.number(name);
    steps = archive.integer(joined(prefix, "loss_scale_steps"));
    const auto name_of_skipped = joined(prefix, "skipped_steps");  // not in files of earlier versions
    if (archive.entries.contains(name_of_skipped)) skipped = archive.integer(name_of_skipped);
    if (!(*scale > 0) || std::isinf(*scale) || steps < 0 || skipped < 0) {
      throw InvalidArgument(text("the checkpoint's loss scale is ", *scale, " after ", steps, " steps and ", skipped,
                                 " that were skipped; it must be above 0, after 0 steps or more"));
    }
  }
  return [=] {
    gradients->reduction().restore(sums);
    auto& updater = gradients->updater();
    if (updater.loss_scale().used())
      scale ? updater.loss_scale().restore(*scale, steps, skipped) : updater.loss_scale().restart();
    updater.set_iterations(iterations);
    updater.restore_learning_rate(learning_rate);
  };
}

}  // namespace

Trackable strategy::counters_of(const std::shared_ptr<GradientPath>& gradients) {
  const auto save = [gradients](Archive& archive, const std::string& prefix) {
    const auto& updater = gradients->updater();
    archive.entries[joined(prefix, "rule")] = updater.optimizer().rule().name();
    archive.entries[joined(prefix, "iterations")] = std::to_string(updater.iterations());
    if (const auto rate = updater.learning_rate_override()) {
      archive.set_numbers(joined(prefix, "learning_rate"), {*rate});
    }
    const auto state = gradients->reduction().state();
    if (!state.order.empty())
      archive.entries[joined(prefix, name_of_order(gradients->parameters()))] = join(state.order, " ");
    if (state.weight_scale > 0) archive.set_numbers(joined(prefix, "weight_scale"), {state.weight_scale});
    if (!updater.loss_scale().used()) return;
    archive.set_numbers(joined(prefix, "loss_scale"), {updater.loss_scale().value()});
    archive.entries[joined(prefix, "loss_scale_steps")] = std::to_string(updater.loss_scale().steps());
    archive.entries[joined(prefix, "skipped_steps")] = std::to_string(updater.loss_scale().skipped());
  };
  const auto load = [gradients](const Archive& archive, const std::string& prefix) {
    return load_counters(gradients, archive, prefix);
  };
  return {save, load, gradients->parameters().topology().all};
}

Trackable ReplicatedOptimizer::trackable() const {
  // Calls visit(name, slot, index) for each state of each parameter.
  const auto each_state = [gradients = impl_](const std::string& prefix, const auto& visit) {
    const auto specs = gradients->updater().optimizer().rule().states();
    for (std::size_t i = 0; i < gradients->parameters().slots().size(); ++i) {
      const auto& slot = gradients->parameters().slots()[i];
      if (!slot.trainable || gradients->remote() != nullptr) continue;  // servers have theirs
      for (std::size_t k = 0; k < specs.size(); ++k)
        visit(joined(prefix, strategy::name_of_state(specs[k], slot.name)), i, k);
    }
  };
  const auto counters = strategy::counters_of(impl_);
  const auto save = [gradients = impl_, counters, each_state](Archive& archive, const std::string& prefix) {
    const auto& parameters = gradients->parameters();
    gradients->fetch_from_devices(for_devices());
    save_with_parts(parameters, archive, [&](Archive& mine) {
      counters.save(mine, prefix);
      each_state(prefix, [&](const std::string& name, std::size_t slot, std::size_t index) {
        const auto all = gradients->updater().whole_state(slot, index);
        if (all.defined()) save_slot(parameters, slot, all, mine, name);
      });
      if (gradients->outer_step() != nullptr) strategy::save_apart(*gradients, each_state, mine, prefix);
    });
  };
  const auto load = [gradients = impl_, counters, each_state](const Archive& archive,
                                                              const std::string& prefix) -> std::function<void()> {
    const auto change_counters = counters.load(archive, prefix);
    strategy::check_states(archive, prefix, *gradients);
    std::vector<std::pair<Tensor, Tensor>> copies;  // to, from
    each_state(prefix, [&](const std::string& name, std::size_t slot, std::size_t index) {
      const auto all = load_slot(archive, name, gradients->parameters(), slot);
      for (const auto& copy : gradients->updater().parts_of(slot, index, all)) copies.push_back(copy);
    });
    std::function<void()> change_apart;
    if (gradients->outer_step() != nullptr)
      change_apart = strategy::load_apart(*gradients, each_state, archive, prefix);
    return [gradients, change_counters, copies, change_apart] {
      change_counters();
      for (const auto& [to, from] : copies) to.copy_(from);
      if (change_apart) change_apart();
      gradients->tell_restored();
    };
  };
  return {save, load, impl_->parameters().topology().all, files_};
}

}  // namespace lockstep
