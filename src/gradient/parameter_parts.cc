#include "gradient/parameter_parts.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "base/text.h"
#include "gradient/replicated_parameters.h"
#include "lockstep/base/error.h"
#include "ops/parameter_hook.h"

namespace lockstep::gradient {
namespace {

bool are_same(const std::vector<Communicator>& a, const std::vector<Communicator>& b) {
  return std::ranges::equal(a, b, [](const auto& one, const auto& other) {
    return one.group().shared_backend() == other.group().shared_backend();
  });
}

}  // namespace

std::shared_ptr<const ParameterParts> parts_of(const at::Tensor& parameter) {
  return ops::hook_of<const ParameterParts>(parameter);
}

std::vector<TrainedTensor> find_parameters(const std::vector<TrainedTensor>& trained) {
  std::vector<TrainedTensor> found;
  std::map<at::TensorImpl*, std::size_t> seen;
  for (const auto& one : trained) {
    const auto [at, is_new] = seen.emplace(one.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back(one);
    } else {
      found[at->second].aliases.push_back(one.name);
    }
  }
  return found;
}

std::vector<TrainedTensor> find_parameters(const torch::nn::Module& module) {
  std::vector<TrainedTensor> trained;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (item.value().defined()) trained.push_back({item.key(), item.value()});
  }
  return find_parameters(trained);
}

std::string description_line(const std::string& name, const at::Tensor& parameter) {
  return text(name, " ", parameter.scalar_type(), " ", parameter.sizes(), parameter.requires_grad() ? "" : " frozen",
              "\n");
}

SlotGroups slots_by_holders(const ReplicatedParameters& parameters) {
  SlotGroups groups;
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    const auto& parts = parameters.slots()[i].parts;
    if (parts == nullptr || !parts->make_up_a_whole()) continue;
    const auto found = std::ranges::find_if(groups, [&](const auto& slots) {
      return are_same(parameters.slots()[slots[0]].parts->holders(), parts->holders());
    });
    (found != groups.end() ? *found : groups.emplace_back()).push_back(i);
  }
  return groups;
}

double sum_squares_of_parts(const ReplicatedParameters& parameters, const SlotGroups& groups,
                            std::span<double> squares) {
  for (const auto& slots : groups) {
    std::vector<double> sums;
    for (const auto slot : slots) sums.push_back(squares[slot]);
    for (const auto& ranks : parameters.slots()[slots[0]].parts->holders()) ranks.sum(sums);
    for (std::size_t i = 0; i < slots.size(); ++i) squares[slots[i]] = sums[i];
  }
  double total = 0;
  for (std::size_t i = 0; i < squares.size(); ++i) {
    if (parameters.is_first_holder(i) && !parameters.slots()[i].is_copy) total += squares[i];
  }
  parameters.topology().all.sum({&total, 1});
  return total;
}

}  // namespace lockstep::gradient

namespace lockstep {

void ReplicatedParameters::find_first_holders() {
  std::vector<std::string> names;
  for (const auto& slot : slots_) names.push_back(slot.name);
  std::set<std::string> seen;
  int rank = 0;
  for (const auto& theirs : topology_.all.all_gather(join(names, "\n"))) {
    std::istringstream lines(theirs);
    std::vector<bool> first;
    for (std::string name; std::getline(lines, name);) first.push_back(seen.insert(name).second);
    if (rank++ == topology_.all.rank()) first_holder_ = std::move(first);
  }
}

void ReplicatedParameters::regroup() {
  if (!split_ || std::exchange(regroups_, topology_.all.regroups()) == topology_.all.regroups()) return;
  if (split_->after_regroup) split_->after_regroup();
  first_holder_.clear();
  find_first_holders();
}

std::vector<std::int64_t> ReplicatedParameters::whole_sizes(std::size_t slot) const {
  const auto& parts = slots_[slot].parts;
  return parts == nullptr ? slots_[slot].sizes : parts->whole_sizes(slots_[slot].sizes);
}

at::Tensor ReplicatedParameters::whole(std::size_t slot, const at::Tensor& part) const {
  const auto& parts = slots_[slot].parts;
  return parts == nullptr ? part : parts->whole(part);
}

at::Tensor ReplicatedParameters::part_of(std::size_t slot, const at::Tensor& whole) const {
  const auto& parts = slots_[slot].parts;
  return parts == nullptr ? whole : parts->part_of(whole);
}

// Compares two numbers of each parameter: its norm, and its sum.
void ReplicatedParameters::compare_whole_copies() const {
  const at::NoGradGuard no_gradient;
  constexpr double kTolerance = 1e-3;  // of the norm
  std::ostringstream lines;
  lines << std::hexfloat;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& value = parameter(0, i);
    if (slots_[i].parts != nullptr || slots_[i].numel == 0 || !slots_[i].flat) continue;
    lines << slots_[i].name << '\t' << value.norm(2, at::kDouble).item<double>() << '\t'
          << value.sum(at::kDouble).item<double>() << '\n';
  }
  struct Seen {
    int rank;
    double norm, sum;
  };
  std::map<std::string, Seen> first;
  int rank = 0;
  for (const auto& theirs : topology_.all.all_gather(lines.str())) {
    std::istringstream each(theirs);
    for (std::string name, norm, sum; std::getline(each, name, '\t');) {
      std::getline(each, norm, '\t');
      std::getline(each, sum);
      const Seen seen{rank, std::strtod(norm.c_str(), nullptr), std::strtod(sum.c_str(), nullptr)};
      const auto& other = first.try_emplace(name, seen).first->second;
      const double difference = std::max(std::abs(seen.norm - other.norm), std::abs(seen.sum - other.sum));
      if (difference <= kTolerance * std::max(seen.norm, other.norm)) continue;
      throw InvalidArgument(
          text("the copies of \"", name, "\" on rank ", other.rank, " and rank ", rank,
               " differ: each trains it on a part of the activations. Is a style missing in the plan, ",
               "such as SequenceParallel for a norm between layers with divided sequences?"));
    }
    ++rank;
  }
}

}  // namespace lockstep
