#include "parallel/sharded_units.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>

#include "base/text.h"
#include "parallel/divided_parameter.h"
#include "parallel/split_linear.h"

namespace lockstep::parallel {
namespace {

// Has a unit gathered when an operator reads one of its parameters.
class UseUnit final : public ops::ParameterHook {
 public:
  UseUnit(std::weak_ptr<ShardedUnits> units, std::size_t unit) : units_(std::move(units)), unit_(unit) {}

  void before(const ops::OperatorCall& call, std::size_t i) override {
    if (call.is_view_of(i)) return;
    if (call.is_set_data() && i == 0)
      throw Error("fully_shard: move a module to a device or another dtype before it is divided");
    const auto units = units_.lock();
    if (units == nullptr) throw Error("the module's parameters have no values: what fully_shard returned is gone");
    if (call.writes(i)) {
      throw Error(text(call.name(),
                       " would change a parameter that fully_shard divided: call it before, change the "
                       "shards, or use FullyShardedParameters::load"));
    }
    units->use(unit_);
  }

 private:
  const std::weak_ptr<ShardedUnits> units_;
  const std::size_t unit_;
};

std::string describe(const std::vector<std::pair<std::string, Tensor>>& parameters) {
  std::string lines;
  for (const auto& [name, parameter] : parameters) {
    lines += text(name, " ", parameter.scalar_type(), " ", parameter.sizes(),
                  parameter.requires_grad() ? "" : " frozen", "\n");
  }
  return lines;
}

}  // namespace

ShardedUnits::ShardedUnits(const Communicator& ranks, FullyShardOptions options)
    : ranks_(ranks), options_(std::move(options)) {}

// The module's parameters that are in no unit yet; tied ones once.
ShardedUnits::Named ShardedUnits::new_parameters(const torch::nn::Module& module, const std::string& name) {
  Named found;
  for (const auto& each : module.named_parameters()) {
    const auto* const identity = each.value().unsafeGetTensorImpl();
    if (std::find(known_.begin(), known_.end(), identity) != known_.end()) continue;
    known_.push_back(identity);
    found.emplace_back(name.empty() ? each.key() : text(name, ".", each.key()), each.value());
  }
  return found;
}

void ShardedUnits::add(const torch::nn::Module& module, const std::string& name, bool keep) {
  const auto parameters = new_parameters(module, name);
  ranks_.check_all_agree(text("parameters of fully_shard's unit \"", name, "\""), describe(parameters));
  if (parameters.empty()) return;
  std::map<std::pair<bool, at::ScalarType>, Named> groups;
  for (const auto& each : parameters) {
    groups[{each.second.requires_grad(), each.second.scalar_type()}].push_back(each);
  }
  units_.push_back(std::make_unique<Unit>());
  units_.back()->keep = keep;
  for (const auto& [kind, group] : groups) add_flat(*units_.back(), group);
}

void ShardedUnits::add_flat(Unit& unit, const Named& parameters) {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  for (const auto& [name, parameter] : parameters) {
    names.push_back(name);
    tensors.push_back(parameter);
  }
  unit.flat.push_back(std::make_unique<FlatShard>(names, tensors, ranks_, options_.replicas));
  auto& flat = *unit.flat.back();
  const auto use = std::make_shared<UseUnit>(weak_from_this(), units_.size() - 1);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ops::add_hook(tensors[i], use);
    if (tensors[i].dim() == 2) ops::add_hook(tensors[i], std::make_shared<SplitWeight>(tensors[i]));
    if (flat.shard(i).defined()) shards_.push_back(flat.shard(i));
    if (!tensors[i].requires_grad()) continue;
    ++unit.gradients;
    after_accumulation_.emplace_back(tensors[i], [this, &unit, &flat, i] { on_gradient(unit, flat, i); });
  }
}

void ShardedUnits::use(std::size_t index) {
  if (current_ != index) {
    const bool may_release = options_.reshard_after_forward || ops::in_backward();
    if (current_ && may_release && !units_[*current_]->keep) {
      for (const auto& flat : units_[*current_]->flat) flat->release();
    }
    current_ = index;
    uses_.push_back(index);
  }
  for (const auto& flat : units_[index]->flat) flat->finish_gather();
  if (options_.prefetch) prefetch();
}

// What followed this use in the step before.
void ShardedUnits::prefetch() {
  const auto next = uses_.size();
  if (next >= uses_before_.size() || uses_before_[next - 1] != uses_.back()) return;
  for (const auto& flat : units_[uses_before_[next]]->flat) flat->start_gather();
}

void ShardedUnits::release() {
  for_each_flat_shard([](FlatShard& flat) { flat.release(); });
  current_.reset();
  if (!in_backward_) uses_.clear();
}

void ShardedUnits::on_gradient(Unit& unit, FlatShard& flat, std::size_t parameter) {
  if (!in_backward_) begin_backward();
  if (!flat.has_taken(parameter)) --unit.waits_for;
  flat.take_gradient(parameter, factor_);
  reduce_complete_units();
}

void ShardedUnits::begin_backward() {
  in_backward_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
  const double mine = std::exchange(examples_, std::nullopt).value_or(1);
  const double all = summed({mine})[0];
  factor_ = all > 0 ? mine / all : 0;
  // The order in which backward completes them, if forward used them in the order in which they were added.
  not_reduced_.clear();
  for (const bool keep : {true, false}) {
    for (const auto& unit : units_) {
      unit->waits_for = unit->gradients;
      if (unit->keep == keep && unit->gradients > 0) not_reduced_.push_back(unit.get());
    }
  }
}

// On all ranks in the same order.
void ShardedUnits::reduce_complete_units() {
  while (!not_reduced_.empty() && not_reduced_.back()->waits_for == 0) {
    reduce(*not_reduced_.back());
    not_reduced_.pop_back();
  }
}

void ShardedUnits::reduce(Unit& unit) {
  for (const auto& flat : unit.flat) {
    flat->release();
    if (flat->parameters()[0].requires_grad()) flat->reduce_gradients();
  }
}

void ShardedUnits::finish_backward() {
  while (!not_reduced_.empty()) {
    reduce(*not_reduced_.back());
    not_reduced_.pop_back();
  }
  std::vector<double> taken;
  for_each_flat_shard([&](const FlatShard& flat) {
    for (std::size_t i = 0; i < flat.parameters().size(); ++i) taken.push_back(flat.has_taken(i) ? 1 : 0);
  });
  const auto by_all = summed(taken);
  auto next = by_all.begin();
  for_each_flat_shard([&](FlatShard& flat) {
    std::vector<bool> by_any;
    for (std::size_t i = 0; i < flat.parameters().size(); ++i) by_any.push_back(*next++ > 0);
    if (flat.parameters()[0].requires_grad()) flat.set_gradients(by_any);
  });
  in_backward_ = false;
  uses_before_ = std::exchange(uses_, {});
  release();
}

std::vector<double> ShardedUnits::summed(std::vector<double> values) const {
  ranks_.sum(values);
  options_.replicas.sum(values);
  return values;
}

}  // namespace lockstep::parallel
