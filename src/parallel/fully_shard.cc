#include "lockstep/parallel/fully_shard.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <map>

#include "base/text.h"
#include "gradient/ownership.h"
#include "gradient/parameter_parts.h"
#include "parallel/gradients.h"
#include "parallel/plan_entries.h"
#include "parallel/sharded_units.h"
#include "parallel/tied_parameters.h"

namespace lockstep {

using parallel::FlatShard;

FullyShardedParameters::FullyShardedParameters(const Communicator& ranks, FullyShardOptions options)
    : units_(std::make_shared<parallel::ShardedUnits>(ranks, std::move(options))) {
  units_->count_writes();
}

void FullyShardedParameters::add(torch::nn::Module& module, const std::string& name, bool keep) {
  units_->add(module, name, keep);
}
const std::vector<Tensor>& FullyShardedParameters::parameters() const { return units_->shards(); }
void FullyShardedParameters::add_examples(double examples) { units_->add_examples(examples); }
void FullyShardedParameters::release() { units_->release(); }
void FullyShardedParameters::expect_forwards() { units_->expect_forwards(); }

internal::RecordedForward FullyShardedParameters::begin_forward(std::optional<double> examples) {
  release();
  return {units_->weights(), examples};
}

double FullyShardedParameters::clip_grad_norm(double max_norm, const Communicator& stages) {
  parallel::check_max_norm(max_norm);
  const at::NoGradGuard no_gradient;
  std::vector<std::pair<Tensor, Tensor>> gradients;
  units_->for_each_parameter([&](const FlatShard& flat, std::size_t i) {
    gradients.emplace_back(flat.parameters()[i], flat.shard(i).grad());
  });
  const auto norm = parallel::norm_of(gradients, units_->ranks(), stages);
  const auto factor = parallel::clip_factor(norm, max_norm);
  for (const auto& shard : parameters()) {
    if (factor != 1 && shard.grad().defined()) shard.mutable_grad().mul_(factor);
  }
  units_->note_gradients();
  return norm;
}

std::map<std::string, Tensor> FullyShardedParameters::gather() const {
  const at::NoGradGuard no_gradient;
  std::map<std::string, Tensor> values;
  units_->release();
  units_->for_each_flat_shard([&](FlatShard& flat) {
    const auto of_flat = flat.gather_values();
    for (std::size_t i = 0; units_->ranks().rank() == 0 && i < of_flat.size(); ++i)
      values[flat.names()[i]] = of_flat[i];
  });
  return values;
}

void FullyShardedParameters::load(const std::map<std::string, Tensor>& values) {
  const auto& units = *units_;
  const bool has_values = units.ranks().rank() == 0 && units.replicas().rank() == 0;
  std::string wrong;
  std::vector<std::vector<Tensor>> of_flat;
  units.for_each_flat_shard([&](const FlatShard& flat) {
    of_flat.emplace_back();
    for (std::size_t i = 0; has_values && i < flat.parameters().size(); ++i) {
      const auto found = values.find(flat.names()[i]);
      if (found == values.end()) {
        wrong = text("FullyShardedParameters::load: there is no \"", flat.names()[i], "\"");
      } else if (found->second.sizes() != flat.parameters()[i].sizes()) {
        wrong = text("FullyShardedParameters::load: ", flat.names()[i], " has shape ", found->second.sizes(),
                     "; the module's has ", flat.parameters()[i].sizes());
      } else {
        of_flat.back().push_back(found->second);
      }
    }
  });
  wrong = units.replicas().broadcast(units.ranks().broadcast(wrong));
  if (!wrong.empty()) throw InvalidArgument(wrong);
  units_->release();
  std::size_t next = 0;
  units.for_each_flat_shard([&](FlatShard& flat) { flat.set_values(of_flat[next++]); });
}

FullyShardedParameters internal::fully_shard(torch::nn::Module& module, const Communicator& ranks,
                                             FullyShardOptions options) {
  auto patterns = options.units;
  FullyShardedParameters sharded(ranks, std::move(options));
  parallel::add_units(module, patterns, [&](torch::nn::Module& unit, const std::string& name, bool keep) {
    sharded.add(unit, name, keep);
  });
  return sharded;
}

namespace parallel {
namespace {

// The place of a shard in the parameter of the module, which may be divided too.
class ShardParts final : public gradient::ParameterParts {
 public:
  ShardParts(const FlatShard& flat, std::size_t i, Communicator ranks)
      : sizes_(flat.parameters()[i].sizes().vec()),
        ownership_(flat.ownership()),
        slot_(i),
        ranks_(std::move(ranks)),
        of_parameter_(gradient::parts_of(flat.parameters()[i])) {}

  std::vector<Communicator> holders() const override {
    auto all = of_parameter_ != nullptr ? of_parameter_->holders() : std::vector<Communicator>();
    all.push_back(ranks_);
    return all;
  }

  std::vector<std::int64_t> whole_sizes(at::IntArrayRef) const override {
    return of_parameter_ != nullptr ? of_parameter_->whole_sizes(sizes_) : sizes_;
  }

  Tensor whole(const Tensor& part) const override {
    const auto values = ownership_->all_gather_slot(slot_, sizes_, part);
    return of_parameter_ != nullptr ? of_parameter_->whole(values) : values;
  }

  Tensor part_of(const Tensor& whole) const override {
    const auto values = of_parameter_ != nullptr ? of_parameter_->part_of(whole) : whole;
    const auto own = gradient::shard_of(ownership_->own().owned(), slot_);
    return values.reshape({-1}).narrow(0, own.begin, own.count);
  }

 private:
  const std::vector<std::int64_t> sizes_;
  const std::shared_ptr<const gradient::Ownership> ownership_;
  const std::size_t slot_;
  const Communicator ranks_;
  const std::shared_ptr<const gradient::ParameterParts> of_parameter_;
};

}  // namespace

void add_units(torch::nn::Module& module, const std::vector<std::string>& patterns,
               const std::function<void(torch::nn::Module& unit, const std::string& name, bool keep)>& add) {
  const auto modules = module.named_modules("", /*include_self=*/false);
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> units;
  for (const auto& pattern : patterns) {
    const auto before = units.size();
    for (const auto& each : modules) {
      if (matches(pattern, each.key())) units.emplace_back(each.key(), each.value());
    }
    if (units.size() > before) continue;
    throw InvalidArgument(
        text("fully_shard: no module is called \"", pattern, "\"; ", suggestion(pattern, modules.keys())));
  }
  for (const auto& [name, unit] : units) add(*unit, name, false);
  add(module, "", true);
}

gradient::ModelPart own_part(const std::shared_ptr<ShardedUnits>& units, const torch::nn::Module& module) {
  std::map<const at::TensorImpl*, std::string> names;  // the first ones
  for (const auto& each : module.named_parameters()) names.try_emplace(each.value().unsafeGetTensorImpl(), each.key());
  gradient::ModelPart split;
  units->for_each_flat_shard([&](const FlatShard& flat) {
    auto capacity = flat.own_elements();
    for (std::size_t i = 0; i < flat.parameters().size(); ++i) {
      const auto& shard = flat.shard(i);
      auto parts = std::make_shared<ShardParts>(flat, i, units->ranks());
      const bool is_last = i + 1 == flat.parameters().size();
      split.trained.push_back({.name = names.at(flat.parameters()[i].unsafeGetTensorImpl()),
                               .tensor = shard,
                               .parts = std::move(parts),
                               .is_copy = is_tied_copy(flat.parameters()[i]),
                               .capacity = is_last ? capacity : shard.numel()});
      capacity -= gradient::whole_lines(shard.numel(), shard.scalar_type());
    }
  });
  units->sum_gradients(1);  // until before_backward says otherwise
  split.after_regroup = [units] { units->abandon(); };
  split.before_forward = [units] { units->release(); };
  split.before_backward = [units](double factor) { units->sum_gradients(factor); };
  return split;
}

}  // namespace parallel
}  // namespace lockstep
