#include "parallel/exchange.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/text.h"
#include "collective/calls.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::parallel {
namespace {

const Purpose kExchange("an exchange inside the model");  // of callers that told none

// Runs a call whose buffers are of tensors on the device of `x`.
void run(Call call, const Tensor& x, const Communicator& ranks) {
  call.purpose = ranks.purpose();
  ranks.group().run(on_stream_of(x, std::move(call)), ranks.deadline());
}

Tensor sum(Tensor x, const Communicator& ranks) {
  const bool is_ours = x.is_contiguous() && x.use_count() == 1 && x.storage().use_count() == 1;
  if (!is_ours) x = x.clone(at::MemoryFormat::Contiguous);
  run(Call::all_reduce(buffer_of(x), ReduceOp::sum), x, ranks);
  return x;
}

Tensor sum_and_divide(const Tensor& x, const Communicator& ranks, std::int64_t dim) {
  part_of(x, dim, 0, ranks.size());  // throws where it cannot be divided
  const auto parts = at::stack(x.chunk(ranks.size(), dim));
  const auto mine = at::empty(parts.sizes().slice(1), parts.options());
  run(Call::reduce_scatter(buffer_of(parts), buffer_of(mine), ReduceOp::sum), x, ranks);
  return mine;
}

Tensor gather(const Tensor& x, const Communicator& ranks, std::int64_t dim) {
  auto sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), ranks.size());
  const auto own = x.contiguous();
  const auto parts = at::empty(sizes, own.options());
  run(Call::all_gather(buffer_of(own), buffer_of(parts)), own, ranks);
  const auto before = at::maybe_wrap_dim(dim, x.dim());
  return parts.movedim(0, before).flatten(before, before + 1);
}

struct Ranks : torch::CustomClassHolder {
  explicit Ranks(Communicator of) : communicator(std::move(of)) {}
  Communicator communicator;
};

struct Exchanged : torch::autograd::Function<Exchanged> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Communicator& ranks,
                        Exchange forward, Exchange backward, std::int64_t dim) {
    context->saved_data["ranks"] = capsule(ranks);
    context->saved_data["forward"] = static_cast<std::int64_t>(forward);
    context->saved_data["backward"] = static_cast<std::int64_t>(backward);
    context->saved_data["dim"] = dim;
    // A result must not be a view, or users could not change it in place.
    const at::AutoDispatchBelowADInplaceOrView without_views;
    const auto result = exchange(x, ranks, forward, dim);
    return result.is_same(x) ? x.view_as(x) : result;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list& gradients) {
    const auto ranks = ranks_of_backward(context->saved_data["ranks"]);
    const auto forward = static_cast<Exchange>(context->saved_data["forward"].toInt());
    const auto backward = static_cast<Exchange>(context->saved_data["backward"].toInt());
    const auto dim = context->saved_data["dim"].toInt();
    if (at::GradMode::is_enabled()) return {exchange(gradients[0], ranks, backward, forward, dim), {}, {}, {}, {}};
    return {exchange(std::move(gradients[0]), ranks, backward, dim), {}, {}, {}, {}};
  }
};

}  // namespace

c10::IValue capsule(const Communicator& ranks) { return c10::IValue::make_capsule(c10::make_intrusive<Ranks>(ranks)); }

Communicator ranks_of_backward(const c10::IValue& capsule) {
  const auto held = c10::static_intrusive_pointer_cast<Ranks>(capsule.toCapsule());
  return held->communicator.with_purpose(collective::backward_of(held->communicator.purpose()));
}

Tensor part_of(const Tensor& x, std::int64_t dim, int rank, int ranks) {
  if (x.size(dim) % ranks != 0) {
    throw InvalidArgument(
        text("dimension ", dim, " of a tensor of shape ", x.sizes(), " cannot be divided among ", ranks, " ranks"));
  }
  const auto size = x.size(dim) / ranks;
  return x.narrow(dim, rank * size, size);
}

Tensor exchange(Tensor x, const Communicator& ranks, Exchange what, std::int64_t dim) {
  if (ranks.size() == 1) return x;
  switch (what) {
    case Exchange::keep: return x;
    case Exchange::sum: return sum(std::move(x), ranks);
    case Exchange::take_part: return part_of(x, dim, ranks.rank(), ranks.size()).contiguous();
    case Exchange::gather: return gather(x, ranks, dim);
    case Exchange::sum_and_divide: return sum_and_divide(x, ranks, dim);
  }
  return x;
}

Tensor exchange(const Tensor& x, const Communicator& ranks, Exchange forward, Exchange backward, std::int64_t dim) {
  if (ranks.size() == 1) return x;
  return Exchanged::apply(x, ranks.purpose().told() ? ranks : ranks.with_purpose(kExchange), forward, backward, dim);
}

}  // namespace lockstep::parallel
