#include "parallel/tied_parameters.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/parameter_hook.h"
#include "parallel/name_pattern.h"

namespace lockstep::parallel {
namespace {

Tensor find(const StageParameter& wanted, const torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  if (const auto* const found = parameters.find(wanted.name)) return *found;
  throw InvalidArgument(text("Pipeline: stage ", wanted.stage, " has no parameter \"", wanted.name, "\" to tie; ",
                             suggestion(wanted.name, parameters.keys())));
}

// Of a copy that is not the first.
struct TiedCopy final : ops::ParameterHook {};

}  // namespace

bool is_tied_copy(const Tensor& parameter) {
  const auto hooks = ops::hooks_of(parameter);
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const TiedCopy*>(hook.get()) != nullptr; });
}

TiedParameter::TiedParameter(const std::vector<StageParameter>& copies, const PipelineSchedule& schedule,
                             const StageModules& mine, const Communicator& ranks) {
  if (copies.empty()) throw InvalidArgument("Pipeline: a tied parameter without copies");
  for (const auto& copy : copies) {
    if (copy.stage < 0 || copy.stage >= schedule.stages()) {
      throw InvalidArgument(text("Pipeline: tied parameter \"", copy.name, "\" of stage ", copy.stage, "; there are ",
                                 schedule.stages(), " stages"));
    }
  }
  ranks.abort_on_error([&] {
    for (const auto& copy : copies) {
      for (const auto& [stage, module] : mine) {
        if (stage != copy.stage) continue;
        mine_.push_back(find(copy, *module));
        if (&copy != copies.data()) ops::add_hook(mine_.back(), std::make_shared<TiedCopy>());
      }
    }
  });
  has_first_ = schedule.rank_of_stage[static_cast<std::size_t>(copies[0].stage)] == ranks.rank();
  regroup(ranks);
  if (mine_.empty()) return;
  for (const auto& copy : mine_) {
    ranks_.check_all_agree("shapes of tied parameters", text(copy.scalar_type(), " ", copy.sizes()));
  }
  const at::NoGradGuard no_gradient;
  broadcast(ranks_, {mine_[0]});
  for (const auto& copy : mine_) copy.detach().copy_(mine_[0].detach());
}

void TiedParameter::regroup(const Communicator& ranks) {
  const auto group = ranks.group().split(mine_.empty() ? -1 : 0, has_first_ ? 0 : 1, ranks.deadline());
  if (group != nullptr) ranks_ = ranks.with_group(*group);
}

void TiedParameter::begin_step() {
  earlier_.clear();
  for (const auto& copy : mine_) earlier_.push_back(std::exchange(copy.mutable_grad(), Tensor()));
}

void TiedParameter::finish_step() {
  if (mine_.empty()) return;
  const at::NoGradGuard no_gradient;
  const auto sum = at::zeros_like(mine_[0], at::MemoryFormat::Contiguous);
  for (const auto& copy : mine_) {
    if (copy.grad().defined()) sum.add_(copy.grad());
  }
  all_reduce(ranks_.group(), sum, ReduceOp::sum, ranks_.deadline());
  for (std::size_t i = 0; i < mine_.size(); ++i) {
    if (!mine_[i].requires_grad()) continue;
    mine_[i].mutable_grad() = earlier_[i].defined() ? earlier_[i] + sum : sum.clone();
  }
}

}  // namespace lockstep::parallel
