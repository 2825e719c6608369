// An all-gather of the ranges of one tensor, in place.
#pragma once

#include <ATen/core/Tensor.h>

#include "collective/calls.h"
#include "lockstep/collective/communicator.h"
#include "ops/dtypes.h"

namespace lockstep::gradient {

// Collective. `whole`: flat and contiguous, best in memory of the Group. Rank r has the r-th of consecutive ranges of
// counts[r] elements, and gets the others.
inline void gather_in_place(const Communicator& ranks, const at::Tensor& whole, const Counts& counts) {
  const auto dtype = ops::dtype_of(whole.scalar_type());
  const auto own = collective::share_of(counts, 0, ranks.rank());
  auto* const data = static_cast<std::byte*>(whole.data_ptr());
  auto call = Call::all_gather({data + own.begin * size_of(dtype), own.count(), dtype},
                               {data, static_cast<std::size_t>(whole.numel()), dtype}, counts);
  call.purpose = ranks.purpose();
  ranks.group().run(call, ranks.deadline());
}

}  // namespace lockstep::gradient
