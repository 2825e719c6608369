#include "parallel/equal_gradients.h"

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <memory>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/watching_hook.h"
#include "parallel/divided_parameter.h"

namespace lockstep::parallel {
namespace {

// A share of the norm: ranks that compute the same from equal values differ by rounding at most.
constexpr double kTolerance = 1e-2;

std::array<double, 2> norm_and_sum(const Tensor& gradient) {
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0) return {0, 0};
  const at::NoGradGuard no_gradient;
  const auto root = std::sqrt(static_cast<double>(gradient.numel()));
  return {gradient.norm(2, at::kDouble).item<double>(), gradient.sum(at::kDouble).item<double>() / root};
}

// A share of the norm: the norms of gradients that are no copies of each other differ by more.
constexpr double kSame = 1e-6;

// The second number tells equal values at other places from those at the same.
std::array<double, 2> norm_and_places(const Tensor& values) {
  if (!values.defined() || values.layout() != at::kStrided || values.numel() == 0) return {0, 0};
  const at::NoGradGuard no_gradient;
  const auto flat = values.detach().flatten().to(at::kDouble);
  const auto places = at::arange(1, flat.numel() + 1, flat.options()) / static_cast<double>(flat.numel());
  return {flat.norm().item<double>(), flat.dot(places).item<double>() / std::sqrt(static_cast<double>(flat.numel()))};
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

PartialGradients::PartialGradients(std::string whose, std::string remedy, const Communicator& ranks)
    : whose_(std::move(whose)),
      remedy_(std::move(remedy)),
      ranks_(ranks.with_purpose(Purpose(text("comparing the gradients ", whose_)))),
      uses_(std::make_shared<std::atomic<std::uint64_t>>(0)) {}

Tensor PartialGradients::watched(const Tensor& used, const Tensor& input) const {
  if (ranks_.size() == 1 || !used.requires_grad() || used.is_leaf()) return used;
  if (!std::has_single_bit(++*uses_)) return used;
  used.register_hook([whose = whose_, remedy = remedy_, ranks = ranks_,
                      of_input = norm_and_places(input)](const Tensor& gradient) {
    const auto [norm, places] = norm_and_places(gradient);
    const auto largest = largest_of(std::array{norm, places, of_input[0], of_input[1]}, ranks);
    const auto differs = [&](std::size_t i, double of) { return !(largest[i] + largest[4 + i] <= kSame * of); };
    // A gradient of rounding errors alone, as of the bias of keys, may be the same by chance.
    const double noise = gradient.scalar_type() == at::kDouble ? 1e-12 : 1e-6;
    if (!(largest[0] > noise) || differs(0, largest[0]) || differs(1, largest[0])) return;
    if (differs(2, largest[2]) || differs(3, largest[2])) return;
    throw InvalidArgument(text(
        "the gradient ", whose, " is the same on all ", ranks.size(), " ranks, of norm ", largest[0],
        ", where each should have that of its own part, which are summed; so it is too where parts are equal, as of "
        "constant inputs: try others. ",
        remedy));
  });
  return used;
}

void check_equal_gradients(const Tensor& gradient, const Communicator& ranks, const std::string& whose) {
  const auto [norm, sum] = norm_and_sum(gradient);
  const auto largest = largest_of(std::array{norm, sum}, ranks);
  const double difference = std::max(largest[0] + largest[2], largest[1] + largest[3]);
  if (!(difference > kTolerance * largest[0])) return;  // also with gradients that are no numbers
  throw InvalidArgument(
      text("the gradient ", whose, " differs between ranks: its norm is ", norm, " on rank ", ranks.rank(), ", and ",
           -largest[2], " to ", largest[0],
           " on all. Each rank uses the value for its own part of the activations. For a layer whose output the parts "
           "share, such as keys and values of multi-query attention, use the style ReplicateParallel; for one between "
           "layers with divided sequences SequenceParallel; dropout of whole activations must draw the same numbers on "
           "all ranks"));
}

void watch_gradients(const Tensor& parameter, const std::string& name, const Communicator& ranks) {
  if (ranks.size() == 1) return;
  const auto backwards = std::make_shared<std::atomic<std::uint64_t>>(0);
  const auto named = ranks.with_purpose(Purpose(text("comparing the gradients of ", name)));
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(parameter.getIntrusivePtr());  // which owns the hook
  ops::WatchingHook::add(parameter, [=](const Tensor& gradient) {
    if (!std::has_single_bit(++*backwards)) return;
    const auto leaf = watched.lock();
    if (!leaf || has_style(Tensor(leaf))) return;  // a later parallelize_module has divided it
    check_equal_gradients(gradient, named, text("of ", name, ", which all ranks have whole,"));
  });
}

}  // namespace lockstep::parallel
