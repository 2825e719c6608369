#include "parallel/divided_parameter.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/embedding.h>

#include "base/log.h"
#include "base/text.h"
#include "parallel/exchange.h"
#include "parallel/split_linear.h"

namespace lockstep::parallel {
namespace {

constexpr const char* kReplicateRemedy =
    "ReplicateParallel is for a layer whose output each rank uses for its part of other activations, such as keys and "
    "values of multi-query attention; leave the style out where all use the output alike";

bool is_whole(const Layout& layout) { return std::holds_alternative<Replicate>(layout); }
std::int64_t dim_of(const Layout& layout) { return std::get<Shard>(layout).dim; }
bool is_last(const Layout& layout) { return !is_whole(layout) && dim_of(layout) == -1; }

[[noreturn]] void fail_features(const std::string& layer, const char* style, const Tensor& x, std::int64_t features,
                                const std::string& hint) {
  throw InvalidArgument(
      text(style, " ", layer, ": the input has shape ", x.sizes(), "; its last dimension must be ", features, hint));
}

// The input of a column-parallel layer, whole.
Tensor whole_input(const Tensor& x, const Layout& layout, const Communicator& ranks) {
  if (is_whole(layout)) return exchange(x, ranks, Exchange::keep, Exchange::sum);
  return exchange(x, ranks, Exchange::gather, Exchange::sum_and_divide, dim_of(layout));
}

Tensor colwise_output(const Tensor& y, const Layout& layout, const Communicator& ranks) {
  return is_whole(layout) ? exchange(y, ranks, Exchange::gather, Exchange::take_part) : y;
}

Tensor rowwise_output(const Tensor& y, const Layout& layout, const Communicator& ranks) {
  if (is_whole(layout)) return exchange(y, ranks, Exchange::sum, Exchange::keep);
  return exchange(y, ranks, Exchange::sum_and_divide, Exchange::gather, dim_of(layout));
}

void check_layouts(const std::string& layer, const ColwiseParallel& style) {
  if (is_last(style.input))
    throw InvalidArgument(
        text("ColwiseParallel ", layer, ": input may be Replicate, or Shard of the sequence's dimension"));
  if (!is_whole(style.output) && !is_last(style.output))
    throw InvalidArgument(text("ColwiseParallel ", layer, ": output may be Shard{-1} or Replicate"));
  if (style.parts < 1) throw InvalidArgument(text("ColwiseParallel ", layer, ": parts is ", style.parts));
  if (style.parts > 1 && is_whole(style.output))
    throw InvalidArgument(text("ColwiseParallel ", layer, ": parts is for outputs that stay divided, Shard{-1}"));
}

void check_layouts(const std::string& layer, const RowwiseParallel& style) {
  if (!is_whole(style.input) && !is_last(style.input))
    throw InvalidArgument(text("RowwiseParallel ", layer, ": input may be Shard{-1} or Replicate"));
  if (is_last(style.output))
    throw InvalidArgument(
        text("RowwiseParallel ", layer, ": output may be Replicate, or Shard of the sequence's dimension"));
}

Division division_of_linear(const ColwiseParallel& style) { return {.dim = 0, .blocks = style.parts}; }
Division division_of_linear(const RowwiseParallel&) { return {.dim = 1}; }
Division division_of_embedding(const ColwiseParallel&) { return {.dim = 1}; }
Division division_of_embedding(const RowwiseParallel&) { return {.dim = 0}; }

Tensor linear(const std::string& layer, const ColwiseParallel& style, const Communicator& ranks,
              const LinearCall& call) {
  if (call.x.size(-1) != call.weight.size(1)) {
    fail_features(layer, "ColwiseParallel", call.x, call.weight.size(1), ": the whole input's features");
  }
  const auto x = whole_input(call.x, style.input, ranks);
  if (!is_whole(style.output)) return split_linear(x, call.weight, call.bias);
  const auto y = colwise_output(split_linear(x, call.weight, {}), style.output, ranks);
  return call.bias.defined() ? y + call.bias : y;  // whole: DividedBias
}

Tensor linear(const std::string& layer, const RowwiseParallel& style, const Communicator& ranks,
              const LinearCall& call) {
  const auto features = call.weight.size(1) * (is_whole(style.input) ? ranks.size() : 1);
  if (call.x.size(-1) != features) {
    fail_features(
        layer, "RowwiseParallel", call.x, features,
        is_whole(style.input) ? ": the whole input's features" : ": this rank's part of the input's features");
  }
  const auto x = is_whole(style.input) ? exchange(call.x, ranks, Exchange::take_part, Exchange::gather) : call.x;
  const auto y = rowwise_output(split_linear(x, call.weight, {}), style.output, ranks);
  return call.bias.defined() ? y + call.bias : y;
}

// at::embedding(weight, ids, padding_idx, scale_grad_by_freq, sparse), for other ids.
Tensor look_up(const ops::OperatorCall& call, const Tensor& ids, std::int64_t padding_idx) {
  return at::embedding(call.tensor(0), ids, padding_idx, call.argument(3).toBool(), call.argument(4).toBool());
}

Tensor embed(const std::string&, const ColwiseParallel& style, const Communicator& ranks,
             const ops::OperatorCall& call) {
  return colwise_output(look_up(call, call.tensor(1), call.argument(2).toInt()), style.output, ranks);
}

void check_ids(const std::string& layer, const Tensor& ids, std::int64_t all) {
  if (!ids.is_cpu() || ids.numel() == 0) return;
  const auto [least, most] = at::aminmax(ids);
  for (const auto id : {least.item<std::int64_t>(), most.item<std::int64_t>()}) {
    if (id < 0) throw InvalidArgument(text("RowwiseParallel ", layer, ": the id ", id, " is below 0"));
    if (id >= all)
      throw InvalidArgument(text("RowwiseParallel ", layer, ": the id ", id, " is not below the number of ids, ", all));
  }
}

Tensor embed(const std::string& layer, const RowwiseParallel& style, const Communicator& ranks,
             const ops::OperatorCall& call) {
  const auto rows = call.tensor(0).size(0), first = rows * ranks.rank(), all = rows * ranks.size();
  const auto all_ids = call.tensor(1);
  check_ids(layer, all_ids, all);
  const auto ids = all_ids - first;
  // Ids that no rank has reach the operator, which refuses them on other devices too.
  const auto exist = (all_ids >= 0).logical_and_(all_ids < all);
  const auto elsewhere = (ids < 0).logical_or_(ids >= rows).logical_and_(exist);
  const auto padding_idx = call.argument(2).toInt();
  const bool is_padding_here = padding_idx >= first && padding_idx < first + rows;
  const auto y = look_up(call, ids.masked_fill(elsewhere, 0), is_padding_here ? padding_idx - first : -1);
  return rowwise_output(y.masked_fill(elsewhere.unsqueeze(-1), 0), style.output, ranks);
}

// Looks up rows of a linear layer's weight. The rows are the layer's outputs; row-parallel, its inputs are the
// features.
Tensor embed_with_linear(const std::string& layer, const ColwiseParallel&, const Communicator& ranks,
                         const ops::OperatorCall& call) {
  return embed(layer, RowwiseParallel(), ranks, call);
}
Tensor embed_with_linear(const std::string& layer, const RowwiseParallel&, const Communicator& ranks,
                         const ops::OperatorCall& call) {
  return embed(layer, ColwiseParallel{.output = Replicate()}, ranks, call);
}

// Multiplies by an embedding's weight as a linear layer to logits: each rank has some of the classes, or of the
// features.
std::optional<Tensor> tied_head(const std::string& layer, const RowwiseParallel& style, const Communicator& ranks,
                                LinearCall call, const WholeInputs& inputs) {
  if (!is_whole(style.output)) return {};  // here nobody knows if x is divided too
  inputs.check(call.x);
  if (!style.divided_logits) return linear(layer, ColwiseParallel{.output = Replicate()}, ranks, call);
  if (call.bias.defined() && call.bias.numel() != call.weight.size(0))
    call.bias = exchange(call.bias, ranks, Exchange::take_part, Exchange::gather, 0);
  return linear(layer, ColwiseParallel(), ranks, call);
}
std::optional<Tensor> tied_head(const std::string& layer, const ColwiseParallel&, const Communicator& ranks,
                                const LinearCall& call, const WholeInputs& inputs) {
  RowwiseParallel head;
  if (call.x.size(-1) != call.weight.size(1)) {
    head.input = Replicate();
    inputs.check(call.x);
  }
  return linear(layer, head, ranks, call);
}

Tensor gathered(const Tensor& part, std::int64_t dim, std::int64_t blocks, const Communicator& ranks) {
  const auto in_blocks = part.unflatten(dim, {blocks, part.size(dim) / blocks});
  return exchange(in_blocks, ranks, Exchange::gather, Exchange::take_part, dim + 1).flatten(dim, dim + 1);
}

std::vector<std::int64_t> part_sizes(at::IntArrayRef whole, const Division& division, const Communicator& ranks) {
  auto sizes = whole.vec();
  sizes[static_cast<std::size_t>(division.dim)] /= ranks.size();
  return sizes;
}

}  // namespace

Tensor divided(const Tensor& whole, const Division& division, const Communicator& ranks) {
  const auto dim = division.dim;
  const auto blocks = whole.detach().unflatten(dim, {division.blocks, whole.size(dim) / division.blocks});
  return part_of(blocks, dim + 1, ranks.rank(), ranks.size()).flatten(dim, dim + 1).clone(at::MemoryFormat::Contiguous);
}

std::shared_ptr<const PartialParameter> partial_of(const Tensor& parameter) {
  return ops::hook_of<const PartialParameter>(parameter);
}

std::shared_ptr<const DividedParameter> division_of(const Tensor& parameter) {
  return ops::hook_of<const DividedParameter>(parameter);
}

bool has_style(const Tensor& parameter) {
  return partial_of(parameter) || ops::hook_of<SequencePart>(parameter) || ops::hook_of<SharedLinear>(parameter);
}

DividedParameter::DividedParameter(DividedFor what, Division division, const Tensor& whole, Communicator ranks,
                                   OtherOperators see)
    : PartialParameter(std::move(ranks)),
      what_(std::move(what)),
      division_(division),
      see_(see),
      sizes_(part_sizes(whole.sizes(), division, this->ranks())) {}

std::vector<std::int64_t> DividedParameter::whole_sizes(at::IntArrayRef part) const {
  auto sizes = part.vec();
  sizes[static_cast<std::size_t>(division_.dim)] *= ranks().size();
  return sizes;
}

Tensor DividedParameter::whole(const Tensor& part) const {
  const ops::WithoutHooks reading(part);
  return gathered(part.detach(), division_.dim, division_.blocks, ranks()).detach().contiguous();
}

Tensor DividedParameter::whole_for_all(const Tensor& view, std::int64_t dim) const {
  return gathered(view, dim, division_.blocks, ranks());
}

Tensor DividedParameter::part_along(const Tensor& whole, std::int64_t dim) const {
  return divided(whole, {.dim = dim, .blocks = division_.blocks}, ranks());
}

std::optional<std::int64_t> DividedParameter::divided_dim(const Tensor& view) const {
  std::int64_t stride = 1;
  for (auto i = sizes_.size() - 1; i > static_cast<std::size_t>(division_.dim); --i) stride *= sizes_[i];
  std::optional<std::int64_t> found;
  for (std::int64_t i = 0; i < view.dim(); ++i) {
    if (view.size(i) != sizes_[static_cast<std::size_t>(division_.dim)] || view.stride(i) != stride) continue;
    if (found) return {};
    found = i;
  }
  return found;
}

void DividedParameter::warn_of_gathering(const std::string& op) const {
  {
    const MutexLock lock(mutex_);
    if (!warned_.insert(op).second || ranks().rank() != 0) return;
  }
  log_warning(text(op, " takes ", name(), " whole, of which each of ", ranks().size(), " ranks has a part, ", style(),
                   ": the value is gathered for each such call, which all of the ranks must make"));
}

bool DividedParameter::otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) {
  return run_other_operator(*this, see_, call, place);
}

template <class Style>
DividedWeight<Style>::DividedWeight(DividedFor what, const Tensor& weight, const Style& style, bool is_embedding,
                                    const Communicator& ranks)
    : DividedParameter(std::move(what), is_embedding ? division_of_embedding(style) : division_of_linear(style), weight,
                       ranks),
      weight_(weight),
      style_(style),
      is_embedding_(is_embedding) {
  check_layouts(layer(), style);
  if (is_embedding && !is_whole(style.input) && !is_last(style.input))
    throw InvalidArgument(text(layer(), ": the ids of an embedding are whole; leave out `input`"));
}

template <class Style>
bool DividedWeight<Style>::run(const ops::OperatorCall& call, std::size_t i) {
  if (is_embedding_) {
    if (call.name() != "aten::embedding" || i != 0) return false;
    ids_.check(call.tensor(1));
    call.finish(embed(layer(), style_, ranks(), call));
    return true;
  }
  const auto operands = linear_call(call, i, weight_);
  if (!operands) return false;
  if (is_whole(style_.input)) inputs_.check(operands->x);
  call.finish(linear(layer(), style_, ranks(), *operands));
  return true;
}

template <class Style>
bool DividedWeight<Style>::otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) {
  std::optional<Tensor> result;
  if (is_embedding_) {
    const auto operands = linear_call(call, place.index, weight_);
    if (operands) result = tied_head(layer(), style_, ranks(), *operands, inputs_);
  } else if (call.name() == "aten::embedding" && place.index == 0 && division().blocks == 1) {
    ids_.check(call.tensor(1));
    result = embed_with_linear(layer(), style_, ranks(), call);
  }
  if (!result) return DividedParameter::otherwise(call, place);
  call.finish(std::move(*result));
  return true;
}

DividedBias::DividedBias(DividedFor what, const Tensor& bias, const ColwiseParallel& style, const Communicator& ranks)
    : DividedParameter(std::move(what), {.dim = 0, .blocks = style.parts}, bias, ranks),
      output_is_whole_(is_whole(style.output)) {}

void DividedBias::before(const ops::OperatorCall& call, std::size_t i) {
  DividedParameter::before(call, i);
  if (output_is_whole_ && is_added_to_whole(call, i)) call.argument(i) = whole_for_all(call.tensor(i), 0);
}

bool DividedBias::otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) {
  const bool is_added_to_part = !output_is_whole_ && is_part_of_outputs(call, call.tensor(place));
  return !is_added_to_part && DividedParameter::otherwise(call, place);
}

bool DividedBias::is_added_to_whole(const ops::OperatorCall& call, std::size_t i) const {
  const auto& name = call.name();
  if (name == "aten::linear") return i == 2;
  if (name == "aten::addmm") return i == 0;
  if ((name != "aten::add" && name != "aten::add_") || i > 1 || call.writes(i)) return false;
  const auto other = call.tensor(1 - i);
  return other.defined() && other.dim() > 1 && other.size(-1) == call.tensor(i).numel() * ranks().size();
}

SharedLinear::SharedLinear(std::string layer, const Tensor& weight, const ReplicateParallel& style, Communicator ranks)
    : layer_(std::move(layer)),
      weight_(weight),
      style_(style),
      ranks_(std::move(ranks)),
      inputs_(layer_, ranks_),
      gradients_(text("of the output of ", layer_), kReplicateRemedy, ranks_) {
  if (is_last(style.input))
    throw InvalidArgument(
        text("ReplicateParallel ", layer_, ": input may be Replicate, or Shard of the sequence's dimension"));
}

bool SharedLinear::run(const ops::OperatorCall& call, std::size_t i) {
  const auto operands = linear_call(call, i, weight_);
  if (!operands) return false;
  auto x = operands->x;  // each rank has the whole gradient of its output
  if (is_whole(style_.input)) {
    inputs_.check(x);
  } else {
    x = exchange(x, ranks_, Exchange::gather, Exchange::take_part, dim_of(style_.input));
  }
  const auto y =
      gradients_.watched(exchange(split_linear(x, operands->weight, {}), ranks_, Exchange::keep, Exchange::sum));
  call.finish(operands->bias.defined() ? y + operands->bias : y);
  return true;
}

SequencePart::SequencePart(const std::string& name, Communicator ranks, Of of)
    : ranks_(std::move(ranks)),
      of_(of),
      gradients_(text("of ", name),
                 of == Of::replicate_parallel
                     ? kReplicateRemedy
                     : "SequenceParallel is for a layer whose input is divided along the sequence; leave the style out "
                       "where each rank has the whole input",
                 ranks_) {}

void SequencePart::before(const ops::OperatorCall& call, std::size_t i) {
  if (call.name() == "aten::embedding") call.argument(1) = part_of(call.tensor(1), -1, ranks().rank(), ranks().size());
  if (!at::GradMode::is_enabled() || !call.reads() || call.writes(i)) return;  // in backward too
  if (!call.argument(i).isTensor())
    throw InvalidArgument(text("SequenceParallel: ", call.name(), " takes a list of parameters; use them one by one"));
  if (is_of_it_alone(call, {i})) return;  // such as a norm, which all ranks make alike
  if (!call.tensor(i).requires_grad()) return;
  call.argument(i) = exchange(call.tensor(i), ranks(), Exchange::keep, Exchange::sum);
  if (of_ == Of::rowwise_parallel) return;  // the layer itself divides its output
  // A bias has the same gradient on all ranks where the loss is linear in the outputs; not so the same input.
  gradients_.watched(call.tensor(i), call.arguments() > 1 ? call.tensor(i == 0 ? 1 : 0) : Tensor());
}

bool SequencePart::otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) {
  return at::GradMode::is_enabled() && keeps_hooks(call, place);
}

void DividedParameter::before(const ops::OperatorCall& call, std::size_t i) {
  if (!call.is_set_storage() || i != 0 || !call.tensor(1).defined()) return;
  if (call.tensor(0).sizes() == call.tensor(1).sizes()) return;
  throw InvalidArgument(text(layer(), ": a rank's part has shape ", call.tensor(0).sizes(), ", but values of shape ",
                             call.tensor(1).sizes(), " are loaded: load the whole before parallelize_module"));
}

template class DividedWeight<ColwiseParallel>;
template class DividedWeight<RowwiseParallel>;

}  // namespace lockstep::parallel
