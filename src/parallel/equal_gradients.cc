#include "parallel/equal_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <utility>

#include "base/text.h"
#include "gradient/tensor_map.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/watching_hook.h"
#include "parallel/divided_parameter.h"
#include "parallel/mesh_backend.h"

namespace lockstep::parallel {
namespace {

// Shares of the norm. Ranks that compute the same from equal values differ by rounding at most; the norms of gradients
// that are no copies of each other differ by more.
constexpr double kTolerance = 1e-2, kSame = 1e-6;

constexpr std::int64_t kChunk = std::int64_t{1} << 20;  // elements: that the copies in double precision stay small

// Two numbers, the same for equal tensors: the norm, and the product with the cosines of 1, 2, 3, ..., which no tensor
// resembles. Where tensors differ, the products do so by about the norm of the difference.
std::array<double, 2> fingerprint(const Tensor& values) {
  if (!values.defined() || values.layout() != at::kStrided) return {0, 0};
  const at::NoGradGuard no_gradient;
  const auto flat = values.detach().reshape(-1);
  double squares = 0, product = 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const auto part = flat.narrow(0, begin, std::min(kChunk, flat.numel() - begin)).to(at::kDouble);
    squares += part.dot(part).item<double>();
    product += part.dot(at::arange(begin + 1, begin + 1 + part.numel(), part.options()).cos_()).item<double>();
  }
  return {std::sqrt(squares), product};
}

// True of a gradient of rounding errors alone, as of a bias of keys, or one before BatchNorm. Ranks may round
// otherwise.
bool is_noise(double norm, const Tensor& gradient) {
  return !(norm > (gradient.scalar_type() == at::kDouble ? 1e-12 : 1e-6));
}

// The largest of the ranks' numbers, and of the negated ones.
template <std::size_t N>
std::array<double, 2 * N> largest_of(std::array<double, N> mine, const Communicator& ranks) {
  std::array<double, 2 * N> largest{};
  for (std::size_t i = 0; i < N; ++i) {
    largest[i] = mine[i];
    largest[N + i] = -mine[i];
  }
  auto call = Call::all_reduce(buffer_of(std::span<double>(largest)), ReduceOp::max);
  call.purpose = ranks.purpose();
  ranks.group().run(call, ranks.deadline());
  return largest;
}

}  // namespace

ComparedCalls::ComparedCalls(const Communicator& ranks)
    : ranks_(ranks), none_(ranks.size() == 1 || Rehearsal::runs_on(ranks)), regroups_(ranks.regroups()) {}

bool ComparedCalls::next_is_one() {
  if (none_) return false;
  const MutexLock lock(mutex_);
  const auto regroups = ranks_.regroups();
  if (std::exchange(regroups_, regroups) != regroups) calls_ = 0;
  return std::has_single_bit(++calls_);
}

PartialGradients::PartialGradients(std::string whose, std::string remedy, const Communicator& ranks)
    : whose_(std::move(whose)),
      remedy_(std::move(remedy)),
      ranks_(ranks.with_purpose(Purpose(text("comparing the gradients ", whose_)))),
      uses_(ranks_) {}

Tensor PartialGradients::watched(const Tensor& used, const Tensor& input) const {
  if (!used.requires_grad() || used.is_leaf() || !uses_.next_is_one()) return used;
  used.register_hook([whose = whose_, remedy = remedy_, ranks = ranks_,
                      of_input = fingerprint(input)](const Tensor& gradient) {
    const auto [norm, product] = fingerprint(gradient);
    const auto largest = largest_of(std::array{norm, product, of_input[0], of_input[1]}, ranks);
    const auto differs = [&](std::size_t i, double of) { return !(largest[i] + largest[4 + i] <= kSame * of); };
    if (is_noise(largest[0], gradient)) return;  // which may be the same by chance
    if (differs(0, largest[0]) || differs(1, largest[0])) return;
    if (differs(2, largest[2]) || differs(3, largest[2])) return;
    throw InvalidArgument(text(
        "the gradient ", whose, " is the same on all ", ranks.size(), " ranks, of norm ", largest[0],
        ", where each should have that of its own part, which are summed; so it is too where parts are equal, as of "
        "constant inputs: try others. ",
        remedy));
  });
  return used;
}

WholeInputs::WholeInputs(const std::string& layer, const Communicator& ranks)
    : layer_(layer.empty() ? "the module" : layer),
      ranks_(ranks.with_purpose(Purpose(text("comparing the inputs of ", layer_, ", for ", ranks.purpose().words())))),
      calls_(ranks_) {}

void WholeInputs::check(const Tensor& input) const {
  if (!calls_.next_is_one()) return;
  const auto [norm, product] = fingerprint(input);
  const auto largest = largest_of(std::array{norm, product, static_cast<double>(input.numel())}, ranks_);
  const auto differs = [&](std::size_t i, double by) { return largest[i] + largest[3 + i] > by; };
  const double rounding = kTolerance * largest[0];
  const bool of_other_sizes = differs(2, 0);
  if (!differs(0, rounding) && !differs(1, rounding) && !of_other_sizes) return;
  const auto how = of_other_sizes ? text("have ", -largest[5], " to ", largest[2], " elements") : "have other values";
  throw InvalidArgument(text("the inputs that ", ranks_.size(), " ranks give ", layer_, " differ: they ", how,
                             ". The ranks compute one batch together, so each must give the same examples, and dropout "
                             "before the layer must draw the same numbers; for other examples on each rank use an "
                             "axis of the mesh for data"));
}

void check_equal_gradients(const Tensor& gradient, const Communicator& ranks, const std::string& whose) {
  const auto [norm, product] = fingerprint(gradient);
  const auto largest = largest_of(std::array{norm, product}, ranks);
  const double difference = std::max(largest[0] + largest[2], largest[1] + largest[3]);
  // Gradients that are no numbers are let through.
  if (!(difference > kTolerance * largest[0]) || is_noise(largest[0], gradient)) return;
  throw InvalidArgument(
      text("the gradient ", whose, " differs between ranks: its norm is ", norm, " on rank ", ranks.rank(), ", and ",
           -largest[2], " to ", largest[0],
           " on all. Each rank uses the value for its own part of the activations. For a layer whose output the parts "
           "share, such as keys and values of multi-query attention, use the style ReplicateParallel; for one between "
           "layers with divided sequences SequenceParallel; all ranks must have the same examples and labels, and "
           "dropout of whole activations must draw the same numbers on "
           "all ranks"));
}

void watch_gradients(const Tensor& parameter, const std::string& name, const Communicator& ranks) {
  if (ranks.size() == 1) return;
  const auto backwards = std::make_shared<ComparedCalls>(ranks);
  const auto named = ranks.with_purpose(Purpose(text("comparing the gradients of ", name)));
  const gradient::WeakTensor watched(parameter);  // which owns the hook
  ops::WatchingHook::add(parameter, [=](const Tensor& gradient) {
    if (!backwards->next_is_one()) return;
    const auto leaf = watched.lock();
    if (!leaf.defined() || has_style(leaf)) return;  // a later parallelize_module has divided it
    check_equal_gradients(gradient, named, text("of ", name, ", which all ranks have whole,"));
  });
}

}  // namespace lockstep::parallel
