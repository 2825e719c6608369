// All shards of fully_shard in this process. Any thread.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

class PartialParameter;

// `ranks`: those that have the other parts. `of`: partial_of the module's parameter before it was divided.
void know_shard(const Tensor& shard, const Communicator& ranks, std::shared_ptr<const PartialParameter> of);
void forget_shard(const Tensor& shard);

// True where one of the tensors is a shard. The second function asks for a shard of which these ranks have the other
// parts.
bool any_is_shard(const std::vector<Tensor>& tensors);
bool any_is_shard_of(const std::vector<Tensor>& tensors, const Communicator& ranks);

// The result of partial_of for the parameter of which the tensor is a shard: not null where other ranks have other
// parameters in its place. Null for a tensor that is no shard.
std::shared_ptr<const PartialParameter> partial_of_shard(const Tensor& tensor);

}  // namespace lockstep::parallel
