#include "gradient/replicated_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "collective/refused_by_all.h"
#include "gradient/layer_over_ranks.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep {
namespace {

bool is_flat_dtype(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

// Shards are in host memory, also those of a module on a device.
gradient::Placement placement_of(const gradient::ModelPart& split, gradient::Placement placement) {
  const bool on_host = std::ranges::all_of(split.trained, [](const auto& each) { return each.tensor.is_cpu(); });
  return on_host && placement == gradient::Placement::staged ? gradient::Placement::mirrored : placement;
}

void check_dtype(const gradient::ParameterSlot& slot) {
  if (!slot.trainable || slot.flat) return;
  throw InvalidArgument(
      text("parameter \"", slot.name, "\" has dtype ", slot.dtype, "; trainable parameters are float or double"));
}

}  // namespace

ReplicatedParameters::ReplicatedParameters(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                           gradient::Placement placement, const OnReplicas& on_replicas,
                                           const Topology& topology)
    : ReplicatedParameters(std::move(modules), std::nullopt, placement, on_replicas, topology) {}

ReplicatedParameters::ReplicatedParameters(std::shared_ptr<torch::nn::Module> module, const gradient::ModelPart& split,
                                           gradient::Placement placement, const Topology& topology)
    : ReplicatedParameters(std::vector{std::move(module)}, split, placement_of(split, placement), {}, topology) {
  find_first_holders();
}

ReplicatedParameters::ReplicatedParameters(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                           std::optional<gradient::ModelPart> split, gradient::Placement placement,
                                           const OnReplicas& on_replicas, const Topology& topology)
    : topology_(topology),
      split_(std::move(split)),
      modules_(std::move(modules)),
      placement_(placement),
      seen_(modules_.size()) {
  if (modules_.empty()) throw InvalidArgument("a model needs at least one replica");
  collective::check_on_all(topology_.all, "worker", [this] {
    find_slots();
    for (int replica = 1; replica < replicas(); ++replica) check_same_as_first(replica);
  });
  compare_models(same_model());
  take_memory(on_replicas);
  bind();
  share_values();
}

// The processes that begin with the same values: also those that train apart from this one.
const Communicator& ReplicatedParameters::same_model() const {
  return topology_.meetings.size() > 1 ? topology_.all : topology_.gradients;
}

void ReplicatedParameters::compare_models(const Communicator& workers) const {
  if (workers.size() > 1) workers.check_all_agree("models", describe());
}

std::string ReplicatedParameters::describe() const {
  std::string tensors;
  for (const auto& slot : slots_) {
    tensors +=
        text(slot.name, " ", slot.dtype, " ", at::IntArrayRef(slot.sizes), slot.trainable ? "" : " frozen", "\n");
  }
  for (std::size_t i = 0; i < buffer_names_.size(); ++i) {
    tensors += text("buffer ", buffer_names_[i], " ", buffer(0, i).scalar_type(), " ", buffer(0, i).sizes(), "\n");
  }
  return tensors;
}

void ReplicatedParameters::find_slots() {
  for (const auto& module : modules_) {
    if (module == nullptr) throw InvalidArgument("the model's factory returned no module");
    gradient::require_no_layers_over_ranks(*module);
    auto& parameters = parameters_.emplace_back();
    for (const auto& found : split_ ? gradient::find_parameters(split_->trained) : gradient::find_parameters(*module))
      parameters.push_back(found.tensor);
    auto& buffers = buffers_.emplace_back();
    for (const auto& item : module->named_buffers()) {
      if (item.value().defined()) buffers.push_back(item.value());
    }
  }
  for (const auto& item : modules_[0]->named_buffers()) {
    if (item.value().defined()) buffer_names_.push_back(item.key());
  }

  for (const auto& found :
       split_ ? gradient::find_parameters(split_->trained) : gradient::find_parameters(*modules_[0])) {
    const auto& tensor = found.tensor;
    gradient::ParameterSlot slot{.name = found.name,
                                 .aliases = found.aliases,
                                 .sizes = tensor.sizes().vec(),
                                 .dtype = tensor.scalar_type(),
                                 .numel = tensor.numel(),
                                 .capacity = std::max(tensor.numel(), found.capacity),
                                 .is_copy = found.is_copy,
                                 .parts = found.parts,
                                 .trainable = tensor.requires_grad(),
                                 .flat = is_flat_dtype(tensor.scalar_type())};
    check_dtype(slot);
    slots_.push_back(std::move(slot));
  }
  std::map<at::ScalarType, gradient::FlatLayout> layouts;
  for (const bool trainable : {true, false}) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      auto& slot = slots_[i];
      if (!slot.flat || slot.trainable != trainable) continue;
      slot.offset = layouts.try_emplace(slot.dtype, slot.dtype).first->second.add(i, slot.capacity);
    }
  }
}

void ReplicatedParameters::check_same_as_first(int replica) {
  const auto& module = *modules_[static_cast<std::size_t>(replica)];
  if (&module == modules_[0].get()) {
    throw InvalidArgument("the model's factory returned one module twice; each replica needs a module of its own");
  }
  const auto found = gradient::find_parameters(module);
  const auto differ = [&](const std::string& name, const std::string& how) {
    throw InvalidArgument(
        text("the model's factory made replicas that differ: parameter \"", name, "\" of replica ", replica, " ", how));
  };
  const auto names_of = [](const auto& one) {
    std::vector<std::string> names{one.name};
    names.insert(names.end(), one.aliases.begin(), one.aliases.end());
    return join(names);
  };
  for (std::size_t i = 0; i < std::max(slots_.size(), found.size()); ++i) {
    if (i >= found.size()) differ(slots_[i].name, "does not exist");
    if (i >= slots_.size()) differ(found[i].name, "exists there only");
    const auto& slot = slots_[i];
    const auto& tensor = found[i].tensor;
    if (found[i].name != slot.name || found[i].aliases != slot.aliases)
      differ(found[i].name, text("has the names ", names_of(found[i]), ", not ", names_of(slot)));
    if (tensor.sizes() != slot.sizes)
      differ(slot.name, text("has shape ", tensor.sizes(), ", not ", at::IntArrayRef(slot.sizes)));
    if (tensor.scalar_type() != slot.dtype)
      differ(slot.name, text("has dtype ", tensor.scalar_type(), ", not ", slot.dtype));
    if (tensor.requires_grad() != slot.trainable) differ(slot.name, "is frozen on one replica only");
    if (tensor.is_same(parameters_[0][i]))
      differ(slot.name, "is replica 0's own tensor; each replica needs one of its own");
  }
  if (buffers_[static_cast<std::size_t>(replica)].size() != buffer_names_.size()) {
    throw InvalidArgument(text("the model's factory made replicas that differ: replica ", replica, " has ",
                               buffers_[static_cast<std::size_t>(replica)].size(), " buffers, replica 0 ",
                               buffer_names_.size()));
  }
}

void ReplicatedParameters::take_memory(const OnReplicas& on_replicas) {
  const auto device_of = [&](int replica) {
    const auto parameters = module(replica).parameters();
    return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  };
  const auto zeros = [&](at::ScalarType dtype, at::Device device) {
    return at::zeros({flat_numel(dtype)}, at::device(device).dtype(dtype));
  };
  const auto take_copy = [&](int copy) {
    const auto device = placement_ == gradient::Placement::device ? device_of(copy) : at::Device(at::kCPU);
    flat_float_[static_cast<std::size_t>(copy)] = zeros(at::kFloat, device);
    flat_double_[static_cast<std::size_t>(copy)] = zeros(at::kDouble, device);
  };
  flat_float_.resize(static_cast<std::size_t>(copies()));
  flat_double_.resize(static_cast<std::size_t>(copies()));
  if (on_replicas && copies() == replicas()) {
    on_replicas(take_copy);
  } else {
    for (int copy = 0; copy < copies(); ++copy) take_copy(copy);
  }
  for (int replica = 0; placement_ == gradient::Placement::staged && replica < replicas(); ++replica) {
    device_float_.push_back(zeros(at::kFloat, device_of(replica)));
    device_double_.push_back(zeros(at::kDouble, device_of(replica)));
  }
}

void ReplicatedParameters::bind() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    for (int replica = 0; replica < replicas(); ++replica) {
      auto& tensor = parameter(replica, i);
      if (!slot.flat) {
        if (replica > 0)
          tensor.set_data(placement_ == gradient::Placement::central ? parameter(0, i) : parameter(0, i).clone());
        continue;
      }
      const auto view = place(replica, slot);
      view.copy_(parameter(0, i));  // replica 0 comes first, while its own values are still in place
      tensor.set_data(view);
    }
    if (slot.flat && placement_ == gradient::Placement::staged) {
      flat(0, slot.dtype).narrow(0, slot.offset, slot.numel).view(slot.sizes).copy_(parameter(0, i));
    }
  }
}

// The part of the flat buffers that holds the replica's parameter.
at::Tensor ReplicatedParameters::place(int replica, const gradient::ParameterSlot& slot) const {
  const auto& on_device = slot.dtype == at::kDouble ? device_double_ : device_float_;
  const auto& buffer = placement_ == gradient::Placement::staged    ? on_device[static_cast<std::size_t>(replica)]
                       : placement_ == gradient::Placement::central ? flat(0, slot.dtype)
                                                                    : flat(replica, slot.dtype);
  return buffer.narrow(0, slot.offset, slot.numel).view(slot.sizes);
}

std::size_t ReplicatedParameters::flat_bytes() const {
  return static_cast<std::size_t>(flat_numel(at::kFloat)) * sizeof(float) +
         static_cast<std::size_t>(flat_numel(at::kDouble)) * sizeof(double);
}

at::Tensor ReplicatedParameters::flat_in(const Memory& memory, std::size_t index, at::ScalarType dtype) const {
  const auto floats = static_cast<std::size_t>(flat_numel(at::kFloat)) * sizeof(float);
  return at::from_blob(
      memory.get() + index * flat_bytes() + (dtype == at::kDouble ? floats : 0), {flat_numel(dtype)},
      [memory](void*) {}, at::TensorOptions(dtype));
}

bool ReplicatedParameters::move_first_copy(const Communicator& ranks) {
  if (moved_to_ == ranks.regroups()) return !mapped_float_.empty();
  const auto bytes = std::max<std::size_t>(1, flat_bytes());
  auto parts = ranks.group().allocate_shared(bytes, ranks.deadline());
  moved_to_ = ranks.regroups();
  mapped_float_.clear();
  mapped_double_.clear();
  std::rotate(parts.begin(), parts.empty() ? parts.end() : parts.begin() + ranks.rank(), parts.end());
  for (const auto& part : parts) {
    mapped_float_.push_back(flat_in(part, 0, at::kFloat));
    mapped_double_.push_back(flat_in(part, 0, at::kDouble));
  }
  move_first_copy(parts.empty() ? ranks.group().allocate(bytes) : parts[0]);
  return !parts.empty();
}

void ReplicatedParameters::move_first_copy(const Memory& memory) {
  for (const auto dtype : {at::kFloat, at::kDouble}) bind_first_copy(flat_in(memory, 0, dtype));
}

void ReplicatedParameters::bind_first_copy(const at::Tensor& memory) {
  const at::NoGradGuard no_grad;
  auto& flat_buffer = (memory.scalar_type() == at::kDouble ? flat_double_ : flat_float_)[0];
  memory.copy_(flat_buffer);
  flat_buffer = memory;
  const int bound = placement_ == gradient::Placement::central  ? replicas()
                    : placement_ == gradient::Placement::staged ? 0
                                                                : 1;
  for (int replica = 0; replica < bound; ++replica) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].flat && slots_[i].dtype == memory.scalar_type()) {
        parameter(replica, i).set_data(place(replica, slots_[i]));
      }
    }
  }
}

void ReplicatedParameters::spread_first_copy() {
  for (int replica = 0; replica < replicas(); ++replica) take_first_copy(replica);
}

void ReplicatedParameters::take_first_copy(int replica) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    if (replica > 0 && replica < copies()) flat(replica, dtype).copy_(flat(0, dtype));
  }
  refresh(replica);
}

std::vector<gradient::Shard> ReplicatedParameters::trainable() const {
  std::vector<gradient::Shard> whole;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].trainable) whole.push_back({i, 0, slots_[i].numel});
  }
  return whole;
}

void ReplicatedParameters::refresh(int replica) {
  if (placement_ != gradient::Placement::staged) return;
  const at::NoGradGuard no_grad;
  device_float_[static_cast<std::size_t>(replica)].copy_(flat_float_[0]);
  device_double_[static_cast<std::size_t>(replica)].copy_(flat_double_[0]);
}

std::string ReplicatedParameters::difference_between_copies() const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    for (int replica = 1; replica < replicas(); ++replica) {
      const auto& first = parameter(0, i);
      const auto& other = parameter(replica, i);
      if (first.is_alias_of(other) || gradient::hash_of(first) == gradient::hash_of(other)) continue;
      return text("the replicas' copies differ: \"", slots_[i].name, "\" of replica ", replica,
                  " is not that of replica 0. Was one changed by itself, by an optimizer of torch::optim or in place? ",
                  "Strategy::optimizer and Model::fit update all");
    }
  }
  return "";
}

void ReplicatedParameters::check_save() const {
  require_equal_between_processes();
  const auto difference = difference_between_copies();
  if (!difference.empty()) log_warning(difference + "; replica 0's are saved");
}

std::string ReplicatedParameters::hashes() const {
  std::string hashes;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    hashes += text(slots_[i].name, " with the hash", replicas() > 1 ? "es" : "");
    for (int replica = 0; replica < replicas(); ++replica)
      hashes += text(" ", gradient::hash_of(parameter(replica, i)));
    hashes += "\n";
  }
  return hashes;
}

void ReplicatedParameters::share_values() {
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < slots_.size(); ++i) values.push_back(parameter(0, i));
  values.insert(values.end(), buffers_[0].begin(), buffers_[0].end());
  broadcast(same_model().with_purpose(Purpose("the first values of a model")), values);
  for (std::size_t i = 0; i < slots_.size(); ++i) assign(i, parameter(0, i));
  for (std::size_t i = 0; i < buffer_names_.size(); ++i) assign_buffer(i, buffer(0, i));
}

std::int64_t ReplicatedParameters::flat_numel(at::ScalarType dtype) const {
  std::int64_t end = 0;
  for (const auto& slot : slots_) {
    if (slot.flat && slot.dtype == dtype) end += gradient::whole_lines(slot.capacity, slot.dtype);
  }
  return end;
}

void ReplicatedParameters::follow_first_replica() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const bool trained = parameter(0, i).requires_grad();
    for (int replica = 1; replica < replicas(); ++replica) {
      auto& copy = parameter(replica, i);
      if (copy.requires_grad() != trained) copy.set_requires_grad(trained);
    }
  }
}

void ReplicatedParameters::update_trainable() {
  follow_first_replica();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].trainable = parameter(0, i).requires_grad();
    check_dtype(slots_[i]);
  }
}

void ReplicatedParameters::require_known_trainable() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].trainable || !parameter(0, i).requires_grad()) continue;
    throw InvalidArgument(
        text("parameter \"", slots_[i].name,
             "\" requires a gradient, and was frozen when its optimizer was made, which has no state ",
             "for it: call compile (in a loop of your own, Strategy::optimizer) again"));
  }
}

std::string ReplicatedParameters::describe_frozen() const {
  std::string frozen;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!parameter(0, i).requires_grad()) frozen += text("frozen parameter ", slots_[i].name, "\n");
  }
  return frozen;
}

void ReplicatedParameters::assign(std::size_t slot, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  if (split_ && split_->before_forward) split_->before_forward();
  const int apart = placement_ == gradient::Placement::central ? 1 : replicas();  // have memory of their own
  for (int replica = 0; replica < apart; ++replica) {
    if (!parameter(replica, slot).is_same(value)) parameter(replica, slot).copy_(value);
  }
  if (const auto& info = slots_[slot]; placement_ == gradient::Placement::staged && info.flat)
    flat(0, info.dtype).narrow(0, info.offset, info.numel).view(info.sizes).copy_(value);
  ++assignments_;
  if (watch_.on_assign) watch_.on_assign(slot);
}

}  // namespace lockstep
