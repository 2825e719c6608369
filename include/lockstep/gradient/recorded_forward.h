// A forward that is recorded, so that its backward counts by the forward's examples.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lockstep::gradient {
class BackwardWeights;
}

namespace lockstep::internal {

// While this lives, its thread makes a forward: backwards through its operators count its examples. One thread.
class RecordedForward {
 public:
  // `examples`: how many the inputs have; empty where they do not tell. `weights` must outlive this object.
  RecordedForward(gradient::BackwardWeights& weights, std::optional<double> examples);
  ~RecordedForward();
  RecordedForward(const RecordedForward&) = delete;
  RecordedForward& operator=(const RecordedForward&) = delete;

  // The forward's output, unchanged in value. A tensor is one with which a backward may begin.
  template <class Output>
  Output result(Output output) const {
    if constexpr (std::is_same_v<Output, at::Tensor>) return as_result(std::move(output));
    return output;
  }

 private:
  at::Tensor as_result(at::Tensor output) const;

  gradient::BackwardWeights& weights_;
  const std::optional<double> examples_;
  const std::uint64_t begin_;
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T>
constexpr bool is_optional = false;
template <class T>
constexpr bool is_optional<std::optional<T>> = true;

// Sets `examples` where the input tells them, and returns whether a further input is to be looked at. Numbers, strings
// and empty values are passed over; tuples, pairs and arrays are looked into. A vector may have one example an element,
// or a batch; a struct hides what it has: neither tells.
template <class Input>
bool passes_over(const Input& input, std::int64_t batch_dim, std::optional<double>& examples) {
  if constexpr (std::is_base_of_v<at::Tensor, Input>) {
    if (!input.defined() || input.dim() <= batch_dim) return true;
    examples = static_cast<double>(input.size(batch_dim));
    return false;
  } else if constexpr (is_optional<Input>) {
    return !input || passes_over(*input, batch_dim, examples);
  } else if constexpr (TupleLike<Input>) {
    return std::apply([&](const auto&... parts) { return (passes_over(parts, batch_dim, examples) && ...); }, input);
  } else {
    return std::is_arithmetic_v<Input> || std::is_enum_v<Input> || std::is_array_v<Input> ||
           std::is_same_v<Input, std::string> || std::is_same_v<Input, std::nullopt_t> ||
           std::is_same_v<Input, const char*>;
  }
}

// The size of dimension `batch_dim` of the first tensor among the inputs that has the dimension. Empty where the inputs
// do not tell.
template <class... Inputs>
std::optional<double> examples_in(std::int64_t batch_dim, const Inputs&... inputs) {
  std::optional<double> examples;
  static_cast<void>((passes_over(inputs, batch_dim, examples) && ...));
  return examples;
}

}  // namespace lockstep::internal
