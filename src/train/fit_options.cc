#include "train/fit_options.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdlib>

#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "collective/refused_by_all.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/cluster.h"
#include "optimizer/rules.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/model_impl.h"
#include "train/shapes.h"

namespace lockstep::train {

namespace {

std::uint64_t hash_or_0(const Tensor& tensor) { return tensor.defined() ? gradient::hash_of(tensor) : 0; }

// True where each row is one-hot, or has probabilities.
bool are_of_one_class(const Tensor& y) {
  constexpr double kTolerance = 1e-3;
  return !y.is_complex() && y.ge(0).all().item<bool>() &&
         (y.sum(-1, false, at::kDouble) - 1).abs().le(kTolerance).all().item<bool>();
}

// Returns the class of each example, or of each position: [batch, ...].
Tensor labels_of(const Tensor& y, bool sparse) {
  auto labels = y;
  if (y.dim() > 1 && y.size(-1) == 1) {
    labels = y.squeeze(-1);
  } else if (y.dim() > 1 && !sparse) {
    if (!are_of_one_class(y)) {
      throw InvalidArgument(
          text("fit: class_weight needs one class for each example: y of shape ", y.sizes(),
               " has rows that are not one-hot; for several labels at once, or numbers, give sample weights"));
    }
    return y.argmax(-1);
  }
  if (labels.is_complex() || (labels.is_floating_point() && !labels.eq(labels.floor()).all().item<bool>()))
    throw InvalidArgument("fit: class_weight needs classes, and y has labels that are no whole numbers");
  return labels.to(at::kLong).contiguous();
}

// Repeats the examples' sample weights for each of their labels.
Tensor for_each_label(const Tensor& weight, const Tensor& labels) {
  if (weight.numel() == labels.numel()) return weight.reshape(labels.sizes());
  if (const auto wider = widened(weight, labels)) return *wider;
  throw InvalidArgument(text("fit: sample weights have shape ", weight.sizes(), ", and the labels that class_weight ",
                             "weighs have ", labels.sizes()));
}

// Multiplies the batch's sample weights by the weights of its labels.
Example weigh_by_class(Example batch, const std::map<std::int64_t, double>& class_weight, bool sparse) {
  if (!batch.y.defined()) throw InvalidArgument("fit: class_weight needs data with labels");
  if (batch.y.dim() == 0) throw InvalidArgument("fit: class_weight needs batches; call batch() on the data set first");
  const auto labels = labels_of(batch.y, sparse);
  auto weights = at::ones(labels.sizes(), at::kFloat);
  for (std::int64_t i = 0; i < labels.numel(); ++i) {
    const auto found = class_weight.find(labels.const_data_ptr<std::int64_t>()[i]);
    if (found != class_weight.end()) weights.mutable_data_ptr<float>()[i] = static_cast<float>(found->second);
  }
  batch.weight = batch.weight.defined() ? for_each_label(batch.weight, labels) * weights : weights;
  return batch;
}

}  // namespace

void check_fit_options(const Dataset& data, const FitOptions& options) {
  for (std::size_t i = 0; i < options.callbacks.size(); ++i) {
    if (options.callbacks[i].operator->() == nullptr) throw InvalidArgument(text("fit: callback ", i, " is null"));
  }
  require(options.epochs >= 1, "fit: epochs", options.epochs, "at least 1");
  require(options.initial_epoch >= 0, "fit: initial_epoch", options.initial_epoch, "0 or more");
  require(options.steps_per_epoch >= 0, "fit: steps_per_epoch", options.steps_per_epoch,
          "0 (the whole data set) or more");
  require(options.validation_steps >= 0, "fit: validation_steps", options.validation_steps, "0 (all) or more");
  require(options.validation_freq >= 1, "fit: validation_freq", options.validation_freq, "at least 1");
  const auto refuse_endless = [](const char* what, const Dataset& endless, const char* name, std::int64_t steps) {
    if (steps > 0 || endless.cardinality() != Dataset::kInfinite) return;
    throw InvalidArgument(text("fit: ", what, " is endless; set ", name, ", or take() a part of it"));
  };
  refuse_endless("the data set", data, "steps_per_epoch", options.steps_per_epoch);
  if (options.validation_data) {
    refuse_endless("validation_data", *options.validation_data, "validation_steps", options.validation_steps);
  }
  for (const auto& [label, weight] : options.class_weight) {
    require(weight >= 0 && !std::isinf(weight), text("fit: class_weight of ", label), weight, "0 or more, and finite");
  }
  require(options.verbose >= -1 && options.verbose <= 2, "fit: verbose", options.verbose, "-1 (automatic), 0, 1 or 2");
}

void require_validation_data(const std::optional<Dataset>& kept, const FitOptions& options,
                             const internal::LocalReplicas& replicas) {
  const bool validates = options.epochs / options.validation_freq > options.initial_epoch / options.validation_freq;
  if (!validates || !kept) return;
  const auto& data = *kept;
  const auto batches = data.cardinality();
  if (batches > 0 || batches == Dataset::kInfinite) return;
  const bool others_have_more = replicas.workers.size() > 1 && data.options().auto_shard_policy == AutoShardPolicy::off;
  if (others_have_more || (batches != 0 && strategy::first_element(data, replicas).x.defined())) return;
  throw InvalidArgument("fit: validation_data is empty; it must have at least one batch");
}

std::string describe_compiled(const ModelImpl& model) {
  const auto names = [](const std::vector<Metric>& metrics) {
    std::vector<std::string> all;
    for (const auto& metric : metrics) all.push_back(metric.name());
    return all.empty() ? "none" : join(all);
  };
  const auto& compiled = *model.compiled;
  return text("loss ", compiled.loss.name(), "\nreduction of the loss ", static_cast<int>(compiled.loss.reduction()),
              "\nmetrics ", names(compiled.metrics), "\nweighted_metrics ", names(compiled.weighted_metrics));
}

std::string describe_fit(const ModelImpl& model, const Dataset& data, const FitOptions& options,
                         const internal::LocalReplicas& replicas) {
  const auto first = strategy::first_element(data, replicas);
  const bool own = strategy::reads_its_own(data, replicas);
  const auto shape = [own](const Tensor& tensor) {
    return tensor.defined() ? text(own && tensor.dim() > 0 ? tensor.sizes().slice(1) : tensor.sizes()) : "none";
  };
  const auto dtype = [](const Tensor& tensor) { return tensor.defined() ? text(tensor.scalar_type()) : "none"; };
  std::string class_weight;
  for (const auto& [label, weight] : options.class_weight) class_weight += text(" ", label, ": ", weight);
  return text(describe_compiled(model), "\nclass_weight", class_weight.empty() ? " none" : class_weight,
              "\ndtypes of the first batch's x and y ", dtype(first.x), ", ", dtype(first.y), "\nepochs ",
              options.epochs, "\ninitial_epoch ", options.initial_epoch, "\nsteps_per_epoch ", options.steps_per_epoch,
              "\nauto_shard_policy ", static_cast<int>(data.options().auto_shard_policy), "\nbatches in the data set ",
              own ? 0 : data.cardinality(), "\nfirst batch x ", shape(first.x), "\nfirst batch y ", shape(first.y),
              "\nfirst batch's contents (hash; set_random_seed makes shuffles equal) ",
              first.x.defined() && !own ? mix(gradient::hash_of(first.x), hash_or_0(first.y)) : 0);
}

Dataset weighed(const ModelImpl& model, const Dataset& data, const FitOptions& options) {
  if (options.class_weight.empty()) return data;
  const bool sparse = model.compiled->loss.name() == "sparse_categorical_crossentropy";
  return data.map([weights = options.class_weight, sparse](Example batch) {
    return weigh_by_class(std::move(batch), weights, sparse);
  });
}

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
  return text(unwrap(impl.strategy).describe(), "\n", impl.parameters->describe_whole(), "optimizer ",
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
