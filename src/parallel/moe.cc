#include "lockstep/parallel/moe.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>

#include <cmath>
#include <numeric>

#include "base/text.h"
#include "collective/calls.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/divided_parameter.h"
#include "parallel/exchange.h"

namespace lockstep {
namespace {

using Numbers = std::vector<std::int64_t>;

Tensor all_to_all_rows(const Tensor& rows, const Numbers& sent, const Numbers& received, const Communicator& ranks) {
  const auto own = rows.contiguous();
  const auto width = static_cast<std::size_t>(rows.size(1));
  Counts input_counts, output_counts;
  for (const auto count : sent) input_counts.push_back(static_cast<std::size_t>(count) * width);
  for (const auto count : received) output_counts.push_back(static_cast<std::size_t>(count) * width);
  auto result =
      at::empty({std::accumulate(received.begin(), received.end(), std::int64_t{0}), rows.size(1)}, own.options());
  auto call = Call::all_to_all(buffer_of(own), buffer_of(result), input_counts, output_counts);
  call.purpose = ranks.purpose();
  ranks.group().run(on_stream_of(own, std::move(call)), ranks.deadline());
  return result;
}

Tensor exchange_rows(const Tensor& rows, const Numbers& sent, const Numbers& received, const Communicator& ranks);

// Sends rows to ranks 0, 1, ...; the result has the rows from ranks 0, 1, ... Backward sends the gradients back.
struct ExchangeRows : torch::autograd::Function<ExchangeRows> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& rows, const Numbers& sent,
                        const Numbers& received, const Communicator& ranks) {
    context->saved_data["ranks"] = parallel::capsule(ranks);
    context->saved_data["sent"] = sent;
    context->saved_data["received"] = received;
    return all_to_all_rows(rows, sent, received, ranks);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto& data = context->saved_data;
    return {exchange_rows(gradients[0], data.at("received").toIntVector(), data.at("sent").toIntVector(),
                          parallel::ranks_of_backward(data.at("ranks"))),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor exchange_rows(const Tensor& rows, const Numbers& sent, const Numbers& received, const Communicator& ranks) {
  return ranks.size() == 1 ? rows : ExchangeRows::apply(rows, sent, received, ranks);
}

// Each rank's numbers: [rank, n].
Tensor gather_rows(const Tensor& mine, const Communicator& ranks) {
  return parallel::exchange(mine.unsqueeze(0), ranks, parallel::Exchange::gather, 0);
}

// The choices of this rank's tokens that are kept, and the numbers of rows that go to each expert.
struct Routes {
  Tensor choices;  // [kept]: indices into the flat [top_k, tokens] choices, ordered by expert
  Tensor counts;   // [ranks, experts]: kept choices of each rank for each expert
  Tensor counts_on_host;
  std::int64_t dropped = 0;
};

// Choices are counted in the order first choices of ranks 0, 1, ..., then second ones.
Routes route(const Tensor& experts_of, const MoEOptions& options, const Communicator& ranks) {
  const auto top_k = experts_of.size(0), experts = options.experts;
  const auto one_hot = at::one_hot(experts_of, experts);  // [top_k, tokens, experts]
  const auto all = gather_rows(one_hot.sum(1).flatten(), ranks).view({ranks.size(), top_k, experts});
  const auto by_choice = all.transpose(0, 1).reshape({-1, experts});  // [top_k * ranks, experts], in the order above
  const auto before = (by_choice.cumsum(0) - by_choice).view({top_k, ranks.size(), experts}).select(1, ranks.rank());
  const auto place = ((one_hot.cumsum(1) - 1 + before.unsqueeze(1)) * one_hot).sum(-1);  // [top_k, tokens]
  const auto total = all.sum();
  auto capacity = total;
  if (options.capacity_factor > 0)
    capacity = (options.capacity_factor * total.to(at::kDouble) / static_cast<double>(experts)).ceil().to(at::kLong);
  const auto is_kept = place < capacity;
  const auto counts = gather_rows((one_hot * is_kept.unsqueeze(-1)).flatten(0, 1).sum(0), ranks);
  // The host must know how many rows go where, and waits for the device once.
  const auto on_host = at::cat({counts.flatten(), total.unsqueeze(0)}).cpu();
  const auto counts_on_host = on_host.narrow(0, 0, counts.numel()).view(counts.sizes());
  const auto kept = counts_on_host.select(0, ranks.rank()).sum().item<std::int64_t>();
  const auto by_expert = experts_of.masked_fill(is_kept.logical_not(), experts).flatten();  // those not kept come last
  return {by_expert.argsort(/*stable=*/true, 0).narrow(0, 0, kept), counts, counts_on_host,
          on_host[counts.numel()].item<std::int64_t>() - counts_on_host.sum().item<std::int64_t>()};
}

// Returns the places of received rows when they are ordered by expert. They come by rank (0, 1, ...), each rank's by
// expert; received row i becomes row result[i]. counts [ranks, own experts]; `rows` is their sum.
Tensor places_by_expert(const Tensor& counts, std::int64_t rows) {
  const auto begins = [](const Tensor& of) { return (of.flatten().cumsum(0) - of.flatten()).view(of.sizes()); };
  const auto shifts = begins(counts.t()).t() - begins(counts);
  return at::repeat_interleave(shifts.flatten(), counts.flatten(), 0, rows) + at::arange(rows, counts.options());
}

Numbers numbers(const Tensor& tensor) {
  const auto flat = tensor.contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

const MoEOptions& checked(const MoEOptions& options, const Communicator& ranks) {
  if (options.experts < 1 || options.experts % ranks.size() != 0) {
    throw InvalidArgument(
        text("MoE: ", options.experts, " experts; it must be a multiple of the number of ranks, ", ranks.size()));
  }
  if (options.top_k < 1 || options.top_k > options.experts)
    throw InvalidArgument(
        text("MoE: top_k is ", options.top_k, "; it must be from 1 to the number of experts, ", options.experts));
  if (!(options.capacity_factor >= 0)) throw InvalidArgument(text("MoE: capacity_factor is ", options.capacity_factor));
  return options;
}

// The result's calls are for one layer. All ranks make their layers in one order.
Communicator named(const Communicator& ranks) {
  if (ranks.size() == 1 || ranks.purpose().told()) return ranks;
  return ranks.with_purpose(Purpose(text("MoE ", ranks.group().next_number() + 1)));
}

}  // namespace

MoEImpl::MoEImpl(MoEOptions options, std::int64_t width, const internal::MakeModule& make,
                 internal::ForwardOfModule forward, Communicator ranks)
    : options_(checked(options, ranks)), ranks_(named(ranks)), expert_forward_(std::move(forward)) {
  gate_ = register_parameter("gate", at::empty({options_.experts, width}));
  torch::nn::init::kaiming_uniform_(gate_, std::sqrt(5.0));
  const auto own = options_.experts / ranks_.size();
  for (std::int64_t i = 0; i < options_.experts; ++i) {
    const auto expert = make();
    if (i / own != ranks_.rank()) continue;
    experts_.push_back(register_module(text("expert", i), expert));
    for (const auto& parameter : expert->parameters()) {
      ops::add_hook(parameter, std::make_shared<parallel::PartialParameter>(ranks_));
    }
  }
}

Tensor MoEImpl::forward(const Tensor& x) {
  if (x.dim() == 0 || x.size(-1) != gate_.size(1))
    throw InvalidArgument(text("MoE: x has shape ", x.sizes(), "; its last dimension must be ", gate_.size(1)));
  const auto tokens = x.reshape({-1, x.size(-1)});
  const auto probabilities = at::linear(tokens, gate_).softmax(-1);  // [tokens, experts]
  auto [weights, chosen] = probabilities.topk(options_.top_k, -1);
  if (options_.top_k > 1) weights = weights / weights.sum(-1, /*keepdim=*/true);
  const auto experts_of = chosen.t().contiguous();  // [top_k, tokens]
  const auto routes = route(experts_of, options_, ranks_);

  // To the experts' ranks.
  const auto own = options_.experts / ranks_.size();
  const auto& counts = routes.counts_on_host;
  const auto sent = numbers(counts.select(0, ranks_.rank()).view({ranks_.size(), own}).sum(1));
  const auto for_own = counts.narrow(1, ranks_.rank() * own, own);  // [ranks, own experts]
  const auto received = numbers(for_own.sum(1));
  const auto token_of = routes.choices.remainder(std::max<std::int64_t>(tokens.size(0), 1));
  auto rows = exchange_rows(tokens.index_select(0, token_of), sent, received, ranks_);

  // Through the experts.
  const auto places = places_by_expert(routes.counts.narrow(1, ranks_.rank() * own, own), rows.size(0));
  const auto ordered = at::empty_like(rows).index_copy(0, places, rows);
  const auto parts = ordered.split_with_sizes(numbers(for_own.sum(0)));
  std::vector<Tensor> results;
  for (std::size_t i = 0; i < experts_.size(); ++i) results.push_back(expert_forward_(*experts_[i], parts[i]));
  rows = at::cat(results).index_select(0, places);

  // And back, weighted.
  rows = exchange_rows(rows, received, sent, ranks_);
  rows = rows * weights.t().reshape({-1}).index_select(0, routes.choices).unsqueeze(-1);
  const auto y = at::zeros_like(tokens).index_add(0, token_of, rows);

  const auto first = gather_rows(at::one_hot(experts_of[0], options_.experts).sum(0), ranks_).sum(0);
  const auto mean = probabilities.sum(0) / std::max<std::int64_t>(1, tokens.size(0));
  const auto share = first.to(probabilities.scalar_type()) / first.sum();
  balance_loss_ = static_cast<double>(options_.experts) * (share * mean).sum();
  is_recomputed_ = parallel::in_recompute();
  tokens_of_experts_ = numbers(counts.sum(0));
  dropped_ = routes.dropped;
  return y.view(x.sizes());
}

Tensor MoEImpl::balance_loss() const {
  if (is_recomputed_ && at::GradMode::is_enabled() && !parallel::in_recompute()) {
    throw InvalidArgument(
        "MoE: balance_loss of a layer that was called through recompute, or in a stage of a pipeline that recomputes, "
        "has no gradient: call the layer itself, or read the value with gradients off");
  }
  return balance_loss_;
}

}  // namespace lockstep
