// Attention of this rank's queries to all keys, a part at a time. Results of parts are joined by the logarithms of
// their sums of exponentials, as in FlashAttention (Dao et al. 2022).
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/scaled_dot_product_attention_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include "base/text.h"
#include "collective/calls.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/parallel/context_parallel.h"
#include "parallel/exchange.h"

namespace lockstep {
namespace {

// Tensors that go from rank to rank: after each turn this rank has those of the rank before.
class Ring {
 public:
  Ring(const Communicator& ranks, std::vector<Tensor> mine) : ranks_(ranks), tensors_(std::move(mine)) {
    for (auto& tensor : tensors_) tensor = tensor.contiguous();
  }

  const Tensor& operator[](std::size_t i) const { return tensors_[i]; }
  int owner() const { return owner_.value_or(ranks_.rank()); }

  void turn() {
    const int size = ranks_.size(), next = (ranks_.rank() + 1) % size, before = (ranks_.rank() + size - 1) % size;
    std::vector<Tensor> received;
    std::vector<Call> calls;
    for (const auto& tensor : tensors_) {
      received.push_back(at::empty_like(tensor));
      calls.push_back(on_stream_of(tensor, Call::send(buffer_of(tensor), next)));
      calls.push_back(on_stream_of(tensor, Call::recv(buffer_of(received.back()), before)));
    }
    for (auto& call : calls) call.purpose = ranks_.purpose();
    ranks_.group().run(calls, ranks_.deadline());
    tensors_ = std::move(received);
    owner_ = (owner() + size - 1) % size;
  }

 private:
  const Communicator& ranks_;
  std::vector<Tensor> tensors_;
  std::optional<int> owner_;
};

// The dtype of scores and of sums over parts: float32 for 16 bits, as in kernels for one device.
at::ScalarType sum_type(const Tensor& x) { return at::toOpMathType(x.scalar_type()); }

// Turns autocast off, which would compute products of float32 in 16 bits.
c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}

struct Attention {
  const Communicator* ranks;
  bool is_causal;
  double scale;

  // True where this rank's queries see the keys of rank `owner`.
  bool sees(int owner) const { return !is_causal || owner <= ranks->rank(); }

  // The scores of queries and keys of sum_type.
  Tensor scores(const Tensor& query, const Tensor& key, int owner) const {
    auto scores = at::matmul(query, key.transpose(-2, -1)).mul_(scale);
    if (is_causal && owner == ranks->rank()) {
      const auto later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu_(1);
      scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
    }
    return scores;
  }
};

struct RingAttention : torch::autograd::Function<RingAttention> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Communicator& ranks, bool is_causal, double scale) {
    const Attention attention{&ranks, is_causal, scale};
    const auto exact = without_autocast();
    Ring ring(ranks, {key, value});
    const auto type = sum_type(query);
    const auto exact_query = query.to(type);
    Tensor output, sum;  // of the parts so far, and the logarithm of the sum of exponentials
    for (int i = 0; i < ranks.size(); ++i) {
      if (i > 0) ring.turn();
      if (!attention.sees(ring.owner())) continue;
      const auto scores = attention.scores(exact_query, ring[0].to(type), ring.owner());
      const auto part_sum = scores.logsumexp(-1, /*keepdim=*/true);
      const auto part = at::matmul((scores - part_sum).exp_(), ring[1].to(type));
      if (!output.defined()) {
        output = part;
        sum = part_sum;
        continue;
      }
      const auto joined = at::logaddexp(sum, part_sum);
      output = output * (sum - joined).exp_() + part * (part_sum - joined).exp_();
      sum = joined;
    }
    output = output.to(query.scalar_type());
    context->save_for_backward({query, key, value, output, sum});
    context->saved_data["ranks"] = parallel::capsule(ranks);
    context->saved_data["is_causal"] = is_causal;
    context->saved_data["scale"] = scale;
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled()) throw InvalidArgument("ring_attention cannot be differentiated twice");
    const auto saved = context->get_saved_variables();
    const auto type = sum_type(saved[0]);
    const auto query = saved[0].to(type), gradient = gradients[0].to(type);
    const auto &output = saved[3], &sum = saved[4];
    const auto ranks = parallel::ranks_of_backward(context->saved_data["ranks"]);
    const Attention attention{&ranks, context->saved_data["is_causal"].toBool(),
                              context->saved_data["scale"].toDouble()};
    const auto exact = without_autocast();
    const auto along_output = (gradient * output).sum(-1, /*keepdim=*/true);
    auto of_query = at::zeros_like(query);
    // The gradients of keys and values go round with them, and come home with the last turn.
    const std::vector<Tensor> sums{at::zeros_like(saved[1], type), at::zeros_like(saved[2], type)};
    Ring ring(ranks, {saved[1], saved[2], sums[0], sums[1]});
    for (int i = 0; i < ranks.size(); ++i) {
      if (attention.sees(ring.owner())) {
        const auto key = ring[0].to(type), value = ring[1].to(type);
        const auto weights = (attention.scores(query, key, ring.owner()) - sum).exp_();
        const auto of_scores =
            weights * (at::matmul(gradient, value.transpose(-2, -1)) - along_output) * attention.scale;
        of_query.add_(at::matmul(of_scores, key));
        ring[2].add_(at::matmul(of_scores.transpose(-2, -1), query));
        ring[3].add_(at::matmul(weights.transpose(-2, -1), gradient));
      }
      if (ranks.size() > 1) ring.turn();
    }
    return {of_query.to(saved[0].scalar_type()),
            ring[2].to(saved[1].scalar_type()),
            ring[3].to(saved[2].scalar_type()),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

// The purpose of call `number` in a ContextParallel. A context may live for all steps, so that numbers come again.
Purpose purpose_of_call(std::int64_t number) {
  constexpr std::int64_t kNumbers = 64;
  thread_local std::array<Purpose, kNumbers> named;
  const auto i = (number - 1) % kNumbers;
  auto& purpose = named[static_cast<std::size_t>(i)];
  if (!purpose.told()) purpose = Purpose(text("attention ", i + 1, " in ContextParallel"));
  return purpose;
}

// Adds to the purpose that the caller told what ranks must have in common beside the number of elements. Naming takes a
// lock, so each thread remembers some purposes.
Purpose purpose_with(Purpose told, const Tensor& key, const Tensor& value, bool is_causal, double scale) {
  using Common = std::tuple<std::uint32_t, std::vector<std::int64_t>, std::vector<std::int64_t>, bool, std::uint64_t>;
  constexpr std::size_t kMostNamed = 1024;
  thread_local std::map<Common, Purpose> named;
  Common common{told.hash(), key.sizes().vec(), value.sizes().vec(), is_causal, std::bit_cast<std::uint64_t>(scale)};
  if (const auto found = named.find(common); found != named.end()) return found->second;
  if (named.size() == kMostNamed) named.clear();
  const Purpose purpose(text(is_causal ? "causal " : "", told.told() ? told.words() : "ring_attention", " (keys ",
                             key.sizes(), ", values ", value.sizes(), ", scale ", scale, ")"));
  return named.emplace(std::move(common), purpose).first->second;
}

thread_local ContextParallel* context_of_thread = nullptr;

Tensor attention_in_context(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& mask, double dropout, bool is_causal,
                            std::optional<double> scale, bool enable_gqa) {
  if (context_of_thread == nullptr) {
    return at::compositeimplicitautograd::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal,
                                                                       scale, enable_gqa);
  }
  if ((mask && mask->defined()) || dropout > 0 || enable_gqa)
    throw InvalidArgument(
        "scaled_dot_product_attention in ContextParallel: a mask, dropout and grouped queries are not supported");
  return context_of_thread->attention(query, key, value, {.is_causal = is_causal, .scale = scale});
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("scaled_dot_product_attention", TORCH_FN(attention_in_context));
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("scaled_dot_product_attention", TORCH_FN(attention_in_context));
}

}  // namespace

Tensor ring_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Communicator& ranks,
                      const RingAttentionOptions& options) {
  const auto fits = [&](const Tensor& other) {
    return other.dim() == query.dim() &&
           other.sizes().slice(0, query.dim() - 2) == query.sizes().slice(0, query.dim() - 2);
  };
  if (query.dim() < 2 || !fits(key) || !fits(value) || key.size(-1) != query.size(-1) ||
      key.size(-2) != value.size(-2)) {
    throw InvalidArgument(text("ring_attention: query has shape ", query.sizes(), ", key ", key.sizes(), " and value ",
                               value.sizes(), "; they must be [..., positions, features]"));
  }
  if (options.is_causal && query.size(-2) != key.size(-2)) {
    throw InvalidArgument(text("ring_attention: with is_causal there must be as many queries as keys; query has shape ",
                               query.sizes(), " and key ", key.sizes()));
  }
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  const auto named = ranks.with_purpose(purpose_with(ranks.purpose(), key, value, options.is_causal, scale));
  return RingAttention::apply(query, key, value, named, options.is_causal, scale);
}

ContextParallel::ContextParallel(Communicator ranks)
    : ranks_(std::move(ranks)), before_(std::exchange(context_of_thread, this)) {}
ContextParallel::~ContextParallel() { context_of_thread = before_; }
ContextParallel* ContextParallel::current() { return context_of_thread; }

Tensor ContextParallel::attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const RingAttentionOptions& options) {
  ++attentions_;
  const auto named = ranks_.purpose().told() ? ranks_ : ranks_.with_purpose(purpose_of_call(attentions_));
  return ring_attention(query, key, value, named, options);
}

Tensor ContextParallel::part(const Tensor& whole, std::int64_t dim) const {
  return parallel::part_of(whole, dim, ranks_.rank(), ranks_.size()).contiguous();
}

}  // namespace lockstep
