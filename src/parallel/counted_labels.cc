#include "parallel/counted_labels.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parallel {

void check_labels_count_alike(const char* caller, const Tensor& target, std::int64_t parts) {
  constexpr std::int64_t kIgnoreIndex = -100;
  if (target.scalar_type() != at::kLong || target.dim() == 0 || target.numel() == 0) return;
  const auto counted = target.ne(kIgnoreIndex);
  const auto all = counted.sum().item<std::int64_t>();
  if (all == target.numel()) return;
  for (const auto& part : counted.tensor_split(std::min(parts, target.size(0)))) {
    const auto here = part.sum().item<std::int64_t>();
    if (here * target.size(0) == all * part.size(0)) continue;
    throw InvalidArgument(
        text(caller, ": ", target.numel() - all, " of ", target.numel(), " labels are ", kIgnoreIndex,
             ", and a part of ", part.size(0), " of ", target.size(0), " examples has ", here, " of the ", all,
             " others, so that its mean loss is not over its examples. Give a sum, with Reduction::Sum, and a weight, "
             "the number of labels that count: step(x, target, sum, weight)"));
  }
}

}  // namespace lockstep::parallel
