// Helpers that tests of lowerings share.
#pragma once

#include <algorithm>
#include <random>

#include "tpu/call.h"
#include "tpu/compare_testing.h"

namespace lockstep::tpu {

using One = std::function<at::Tensor(const at::Tensor&)>;
using Two = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

inline std::set<std::string> compared;  // lowerings, by name

// An index for each dimension, or none for all of the dimension.
inline c10::List<std::optional<at::Tensor>> indices(std::initializer_list<at::Tensor> given) {
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& tensor : given) list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  return list;
}

class EachLowering : public testing::Test {
 protected:
  static void SetUpTestSuite() { Trace before_the_first_backward; }
  void SetUp() override { at::manual_seed(1); }

  Sizes shape(std::size_t least = 0, std::size_t most = 4) {
    Sizes sizes(std::uniform_int_distribution<std::size_t>(least, most)(random_));
    for (auto& size : sizes) size = std::uniform_int_distribution<std::int64_t>(1, 5)(random_);
    return sizes;
  }
  std::int64_t dimension(const Sizes& sizes) {
    return std::uniform_int_distribution<std::int64_t>(-static_cast<std::int64_t>(sizes.size()),
                                                       static_cast<std::int64_t>(sizes.size()) - 1)(random_);
  }

  static void same(const Function& function, const Tensors& arguments, double tolerance = 2e-5) {
    expect_same(function, arguments, tolerance, &compared);
  }

  // In float32, float64 and bfloat16, whose numbers have 8 bits.
  void of_one(const std::vector<One>& functions, bool only_positive = false) {
    for (const auto& function : functions) {
      for (const auto& [dtype, tolerance] : std::vector<std::pair<at::ScalarType, double>>{
               {at::kFloat, 2e-5}, {at::kDouble, 1e-6}, {at::kBFloat16, 3e-2}}) {
        auto x = (only_positive ? positive(shape()) : numbers(shape())).to(dtype);
        same([&](const Tensors& all) { return function(all[0]); }, {x}, tolerance);
      }
    }
  }

  // Functions of two tensors whose sizes are broadcast.
  void of_two(const std::vector<Two>& functions) {
    for (const auto& function : functions) {
      for (int round = 0; round < 3; ++round) {
        const auto sizes = shape(1);
        auto other = sizes;
        for (auto& size : other)
          if (std::uniform_int_distribution<int>(0, 2)(random_) == 0) size = 1;
        if (round == 2) other.erase(other.begin());
        same([&](const Tensors& all) { return function(all[0], all[1]); }, {positive(sizes), positive(other)});
      }
    }
  }

  std::mt19937 random_{1};
};

}  // namespace lockstep::tpu
