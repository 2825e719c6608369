// The exchanges of tensor parallelism in forward, each with the matching exchange in backward.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// The kinds of exchange of a tensor along a dimension.
enum class Exchange : std::uint8_t {
  keep,            // nothing
  sum,             // all get the sum of the ranks' tensors
  take_part,       // each keeps its part of what all have
  gather,          // all get the ranks' parts
  sum_and_divide,  // each gets its part of the sum
};

// `forward` now, and `backward` with the gradient. In the notation of Megatron-LM f is (keep, sum) and g is (sum,
// keep). Collective. Parts are equal; throws InvalidArgument where they cannot be.
Tensor exchange(const Tensor& x, const Communicator& ranks, Exchange forward, Exchange backward, std::int64_t dim = -1);

// Exchanges without autograd. A tensor that nobody else uses may be changed.
Tensor exchange(Tensor x, const Communicator& ranks, Exchange what, std::int64_t dim);

// All ranks get rank `root`'s values, which may be of another number elsewhere. Collective.
template <class T>
void broadcast_values(std::vector<T>& values, const Communicator& ranks, int root = 0) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto bytes = ranks.broadcast({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)}, root);
  values.resize(bytes.size() / sizeof(T));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
}

// A rank's equal part along a dimension: a view.
Tensor part_of(const Tensor& x, std::int64_t dim, int rank, int ranks);

// A Communicator in the saved_data of an autograd function, and the same ranks for the function's backward, whose calls
// say so.
c10::IValue capsule(const Communicator& ranks);
Communicator ranks_of_backward(const c10::IValue& capsule);

// Tells modules that a forward is one of recompute. True in this thread during the first forward of recompute, of which
// no graph is kept, and during the second one, in backward. Tensors that such a forward leaves in the module's members
// have no gradient.
bool in_recompute();

}  // namespace lockstep::parallel
