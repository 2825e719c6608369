#include "lockstep/ddp/sharded_parameters.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <map>
#include <set>

#include "base/text.h"
#include "gradient/device_of_sums.h"
#include "gradient/ownership.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

// A tensor's elements in the order of its memory, which has no gaps.
at::Tensor flattened(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

// Equal shares of the elements. The ranges are those of flat buffers that have the ranks' shards of a dtype one after
// the other.
gradient::Ownership ownership_of(const std::vector<at::Tensor>& parameters, const Communicator& ranks) {
  std::vector<gradient::Shard> whole;
  for (std::size_t i = 0; i < parameters.size(); ++i) whole.push_back({i, 0, parameters[i].numel()});
  const auto map = gradient::ShardMap::even(std::move(whole), ranks.size());
  std::vector<gradient::OwnedRange> ranges;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    gradient::OwnedRange range{dtype, 0, {}};
    for (const auto& shards : map.shares()) {
      auto& count = range.counts.emplace_back();
      for (const auto& shard : shards) {
        if (parameters[shard.slot].scalar_type() == dtype) count += static_cast<std::size_t>(shard.count);
      }
    }
    if (range.count() > 0) ranges.push_back(std::move(range));
  }
  return {ranks,
          map.shares(),
          /*replicas=*/1,
          gradient::Ownership::Writes::first_copy,
          /*distance_of_copies=*/0,
          std::move(ranges)};
}

// Compares the ranks' parameters first, so that the checks that follow fail on all ranks or on none.
void check(const std::vector<at::Tensor>& parameters, const Communicator& ranks) {
  std::string lines;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    lines += text("parameter ", i, ": ", parameter.scalar_type(), " ", parameter.sizes(), ", strides ",
                  parameter.strides(), "\n");
  }
  ranks.check_all_agree("parameters of ShardedOptimizer", lines);
  std::set<const at::TensorImpl*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    const bool real = parameter.scalar_type() == at::kFloat || parameter.scalar_type() == at::kDouble;
    if (!real || !parameter.is_non_overlapping_and_dense()) {
      throw InvalidArgument(text("ShardedOptimizer: parameter ", i, " is ", parameter.scalar_type(), " ",
                                 parameter.sizes(), real ? " with gaps in its memory" : "",
                                 "; it must be float or double, without gaps"));
    }
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
      throw InvalidArgument(text("ShardedOptimizer: parameter ", i, " is there twice; name tied ones once"));
    }
  }
}

}  // namespace

struct ShardedParameters::State {
  State(std::vector<at::Tensor> all, const Communicator& members)
      : parameters(std::move(all)),
        ranks(
            members.with_purpose(Purpose(text("the values of ShardedOptimizer ", members.group().next_number() + 1)))),
        ownership(ownership_of(parameters, ranks)) {
    for (const auto& parameter : parameters) places.push_back(parameter.const_data_ptr());
  }

  const std::vector<at::Tensor> parameters;
  const Communicator ranks;
  const gradient::Ownership ownership;
  std::vector<const void*> places;  // [parameter]: address of its values
  const std::int64_t regroups = ranks.regroups();
  std::map<at::ScalarType, at::Tensor> values;  // of all shards of a dtype, rank after rank, as they are gathered

  // Calls act(rank, the shard in its parameter, the shard in `all`) for each shard of the dtype.
  template <class Act>
  void each_shard(at::ScalarType dtype, const at::Tensor& all, const Act& act) const {
    std::int64_t at = 0;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      for (const auto& shard : ownership.of(rank)) {
        const auto& parameter = parameters[shard.slot];
        if (parameter.scalar_type() != dtype) continue;
        act(rank, flattened(parameter.detach()).narrow(0, shard.begin, shard.count), all.narrow(0, at, shard.count));
        at += shard.count;
      }
    }
  }
};

ShardedParameters::ShardedParameters(std::vector<at::Tensor> parameters, Communicator ranks)
    : state_((check(parameters, ranks), std::make_unique<State>(std::move(parameters), ranks))) {
  const auto device = gradient::device_of_sums(state_->ranks, state_->parameters);
  for (const auto& range : state_->ownership.ranges()) {
    if (device.is_cuda()) {
      state_->values.emplace(range.dtype, at::empty({range.count()}, at::TensorOptions(range.dtype).device(device)));
      continue;
    }
    const auto bytes = static_cast<std::size_t>(range.count()) * at::elementSize(range.dtype);
    const auto memory = state_->ranks.group().allocate(bytes);
    state_->values.emplace(range.dtype,
                           at::from_blob(
                               memory.get(), {range.count()}, [memory](void*) {}, at::TensorOptions(range.dtype)));
  }
}

ShardedParameters::~ShardedParameters() = default;

const Communicator& ShardedParameters::ranks() const { return state_->ranks; }

void ShardedParameters::require_as_made() const {
  if (state_->ranks.regroups() != state_->regroups) {
    throw Error("ShardedOptimizer: ranks were lost, and their shards' state with them; make it anew, and load it");
  }
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) {
    if (state_->parameters[i].const_data_ptr() == state_->places[i]) continue;
    throw Error(text("ShardedOptimizer: parameter ", i,
                     " was moved to other memory (by to(device) or set_data); make the optimizer after that"));
  }
}

at::Tensor ShardedParameters::shard(std::size_t i, int rank, const at::Tensor& whole) const {
  const auto& parameter = state_->parameters[i];
  const auto own = gradient::shard_of(state_->ownership.of(rank), i);
  if (own.count == 0) return {};
  const bool same_order = whole.strides() == parameter.strides();
  return flattened(same_order ? whole : at::empty_like(parameter).copy_(whole)).narrow(0, own.begin, own.count);
}

std::vector<at::Tensor> ShardedParameters::shards(int rank) const {
  std::vector<at::Tensor> shards;
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) {
    shards.push_back(shard(i, rank, state_->parameters[i].detach()));
  }
  return shards;
}

at::Tensor ShardedParameters::joined(std::size_t i, const std::vector<at::Tensor>& shards) const {
  const auto whole = at::empty_like(state_->parameters[i].detach());
  flattened(whole).copy_(at::cat(shards));
  return whole;
}

void ShardedParameters::take_gradients(const std::vector<at::Tensor>& shards) const {
  const at::NoGradGuard no_gradient;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto& gradient = state_->parameters[i].grad();
    if (!shards[i].defined() || !gradient.defined()) continue;
    shards[i].mutable_grad() = shard(i, state_->ranks.rank(), gradient.is_sparse() ? gradient.to_dense() : gradient);
  }
}

void ShardedParameters::gather_values() {
  const at::NoGradGuard no_gradient;
  const int own = state_->ranks.rank();
  for (const auto& [dtype, values] : state_->values) {
    state_->each_shard(dtype, values, [&](int rank, const at::Tensor& parameter, const at::Tensor& value) {
      if (rank == own) value.copy_(parameter);
    });
  }
  state_->ownership.gather_values([&](at::ScalarType dtype) { return state_->values.at(dtype); });
  for (const auto& [dtype, values] : state_->values) {
    state_->each_shard(dtype, values, [&](int rank, const at::Tensor& parameter, const at::Tensor& value) {
      if (rank != own) parameter.copy_(value);
    });
  }
}

}  // namespace lockstep::internal
