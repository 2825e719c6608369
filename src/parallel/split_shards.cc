#include "parallel/split_shards.h"

#include <torch/nn/module.h>

#include <map>

#include "gradient/ownership.h"
#include "gradient/parameter_parts.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/tied_parameters.h"

namespace lockstep::parallel {
namespace {

// The place of a shard in the parameter of the module, which may be divided too.
class ShardParts final : public gradient::ParameterParts {
 public:
  ShardParts(const Tensor& parameter, FlatShard::Range range, Communicator ranks)
      : sizes_(parameter.sizes().vec()),
        range_(range),
        ranks_(std::move(ranks)),
        of_parameter_(gradient::parts_of(parameter)) {}

  std::vector<Communicator> holders() const override {
    auto all = of_parameter_ != nullptr ? of_parameter_->holders() : std::vector<Communicator>();
    all.push_back(ranks_);
    return all;
  }

  std::vector<std::int64_t> whole_sizes(at::IntArrayRef) const override {
    return of_parameter_ != nullptr ? of_parameter_->whole_sizes(sizes_) : sizes_;
  }

  Tensor whole(const Tensor& part) const override {
    const auto values = all_gather(ranks_.group(), part, ranks_.deadline()).view(sizes_);
    return of_parameter_ != nullptr ? of_parameter_->whole(values) : values;
  }

  Tensor part_of(const Tensor& whole) const override {
    const auto values = of_parameter_ != nullptr ? of_parameter_->part_of(whole) : whole;
    return values.reshape({-1}).narrow(0, range_.count > 0 ? range_.begin : 0, range_.count);
  }

 private:
  const std::vector<std::int64_t> sizes_;
  const FlatShard::Range range_;
  const Communicator ranks_;
  const std::shared_ptr<const gradient::ParameterParts> of_parameter_;
};

}  // namespace

gradient::SplitModule split_shards(const std::shared_ptr<ShardedUnits>& units, const torch::nn::Module& module) {
  std::map<const at::TensorImpl*, std::string> names;  // the first ones
  for (const auto& each : module.named_parameters()) names.try_emplace(each.value().unsafeGetTensorImpl(), each.key());
  gradient::SplitModule split;
  units->for_each_flat_shard([&](const FlatShard& flat) {
    auto capacity = flat.own_elements();
    for (std::size_t i = 0; i < flat.parameters().size(); ++i) {
      const auto& shard = flat.shard(i);
      auto parts = std::make_shared<ShardParts>(flat.parameters()[i], flat.own_range(i), units->ranks());
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

}  // namespace lockstep::parallel
