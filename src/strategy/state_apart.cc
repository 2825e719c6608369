#include "strategy/state_apart.h"

#include <ATen/ops/full.h>

#include <utility>
#include <vector>

#include "checkpoint/state.h"
#include "data/stored_tensor.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::strategy {
namespace {

using checkpoint::joined;

constexpr const char* kApart = "of_workers";  // each worker's state of the optimizer
constexpr const char* kIterationsApart = "iterations_of_workers";
constexpr const char* kOuter = "outer";

}  // namespace

void save_apart(const GradientPath& gradients, const EachState& each_state, Archive& archive,
                const std::string& prefix) {
  const auto& workers = gradients.parameters().topology().all;
  const auto mine = at::full({1}, gradients.updater().iterations(), at::kLong);
  archive.tensors[joined(prefix, kIterationsApart)] =
      data::to_stored(all_gather(workers.group(), mine, workers.deadline()));
  each_state(joined(prefix, kApart), [&](const std::string& name, std::size_t slot, std::size_t index) {
    const auto state = gradients.updater().state(slot, index).unsqueeze(0);
    archive.tensors[name] = data::to_stored(all_gather(workers.group(), state, workers.deadline()));
  });
  gradients.outer_step()->save(archive, joined(prefix, kOuter));
}

std::function<void()> load_apart(GradientPath& gradients, const EachState& each_state, const Archive& archive,
                                 const std::string& prefix) {
  const auto name_of_iterations = joined(prefix, kIterationsApart);
  if (!archive.tensors.contains(name_of_iterations)) return {};  // of workers that did not train apart
  const auto& workers = gradients.parameters().topology().all;
  const auto change_outer = gradients.outer_step()->load(archive, joined(prefix, kOuter));
  const auto iterations = data::from_stored(archive.tensor(name_of_iterations));
  if (iterations.numel() != workers.size()) {
    return [change_outer, &gradients] {
      change_outer();
      gradients.parameters().spread_first_copy();
    };
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  each_state(joined(prefix, kApart), [&](const std::string& name, std::size_t slot, std::size_t index) {
    const auto mine = data::from_stored(archive.tensor(name))[workers.rank()];
    for (const auto& copy : gradients.updater().parts_of(slot, index, mine)) copies.push_back(copy);
  });
  const auto own_iterations = iterations[workers.rank()].item<std::int64_t>();
  return [change_outer, copies, own_iterations, &gradients] {
    change_outer();
    gradients.parameters().spread_first_copy();
    for (const auto& [to, from] : copies) to.copy_(from);
    gradients.updater().set_iterations(own_iterations);
  };
}

}  // namespace lockstep::strategy
