#include "parallel/tied_parameters.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/parameter_hook.h"
#include "parallel/plan_entries.h"
#include "parallel/sharded_units.h"

namespace lockstep::parallel {
namespace {

Tensor find(const StageParameter& wanted, const torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  if (const auto* const found = parameters.find(wanted.name)) return *found;
  throw InvalidArgument(text("Pipeline: stage ", wanted.stage, " has no parameter \"", wanted.name, "\" to tie; ",
                             suggestion(wanted.name, parameters.keys())));
}

// Marks a copy that is not the first.
struct TiedCopy final : ops::ParameterHook {};

}  // namespace

bool is_tied_copy(const Tensor& parameter) { return ops::hook_of<TiedCopy>(parameter) != nullptr; }

TiedParameter::TiedParameter(const std::vector<StageParameter>& copies, const PipelineSchedule& schedule,
                             const StageModules& mine, const Communicator& ranks) {
  if (copies.empty()) throw InvalidArgument("Pipeline: a tied parameter without copies");
  name_ = text("stage ", copies[0].stage, "'s ", copies[0].name);
  copies_ = static_cast<double>(copies.size());
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
  ranks.abort_on_error([&] {
    for (const auto& copy : mine_) {
      ranks_.check_all_agree("shapes of tied parameters, and which are frozen",
                             text(copy.scalar_type(), " ", copy.sizes(), copy.requires_grad() ? "" : " frozen"));
    }
  });
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
  const auto sum = at::zeros(mine_[0].sizes(), mine_[0].options().requires_grad(false));
  std::array<double, 2> counts{};  // how many copies have a gradient, and how many are trained
  for (const auto& copy : mine_) {
    if (copy.grad().defined()) sum.add_(copy.grad());
    counts[0] += copy.grad().defined() ? 1 : 0;
    counts[1] += copy.requires_grad() ? 1 : 0;
  }
  ranks_.sum(counts);
  const auto [there, trained] = counts;
  if (trained != 0 && trained != copies_) {
    throw InvalidArgument(text("Pipeline: ", name_, " is tied to others: of the ", copies_, " copies ", trained,
                               trained == 1 ? " is" : " are", " trained; freeze all of them, or none"));
  }
  if (there == 0) {
    for (std::size_t i = 0; i < mine_.size(); ++i) mine_[i].mutable_grad() = earlier_[i];
    return;
  }
  all_reduce(ranks_.group(), sum, ReduceOp::sum, ranks_.deadline());
  for (std::size_t i = 0; i < mine_.size(); ++i) {
    if (!mine_[i].requires_grad()) continue;
    mine_[i].mutable_grad() = earlier_[i].defined() ? earlier_[i] + sum : sum.clone();
  }
}

void TiedParameter::check_not_sharded() const {
  if (std::ranges::none_of(mine_, is_sharded)) return;
  throw InvalidArgument(text("Pipeline: ", name_,
                             " is tied to parameters of other stages, and fully_shard has divided it, so that the "
                             "copies' gradients cannot be summed: leave the stages that have copies whole"));
}

}  // namespace lockstep::parallel
