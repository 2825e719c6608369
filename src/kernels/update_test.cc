// Every kernel against the formula, element by element in long double, for lengths around the vector sizes.
#include "kernels/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace lockstep::kernels {
namespace {

template <class T>
class Update : public testing::Test {
 protected:
  using Values = std::vector<T>;

  static Values random_values(std::size_t count, unsigned seed, double low = -1, double high = 1) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<double> uniform(low, high);
    Values values(count);
    for (T& value : values) value = static_cast<T>(uniform(generator));
    return values;
  }

  static void expect_near(const Values& actual, const std::vector<long double>& expected) {
    const double tolerance = std::is_same_v<T, float> ? 2e-6 : 1e-14;
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], static_cast<double>(expected[i]), tolerance) << i << " of " << actual.size();
    }
  }

  // Calls check(count) for lengths around vector and block sizes.
  template <class Check>
  static void for_lengths(const Check& check) {
    for (const std::size_t count : {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257, 1000}) check(count);
  }

  const UpdateKernels<T>& kernel = update_kernels<T>();
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(Update, Types);

TYPED_TEST(Update, ScaledSumAddsInOrder) {
  this->for_lengths([&](std::size_t count) {
    for (std::size_t inputs = 1; inputs <= 4; ++inputs) {
      std::vector<std::vector<TypeParam>> values;
      std::vector<const TypeParam*> pointers;
      for (std::size_t k = 0; k < inputs; ++k) {
        values.push_back(this->random_values(count, static_cast<unsigned>(k)));
        pointers.push_back(values.back().data());
      }
      std::vector<TypeParam> output(count);
      this->kernel.scaled_sum(pointers.data(), inputs, TypeParam(0.25), output.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        TypeParam sum = values[0][i];
        for (std::size_t k = 1; k < inputs; ++k) sum += values[k][i];
        ASSERT_EQ(output[i], sum * TypeParam(0.25));
      }
    }
  });
}

TYPED_TEST(Update, SumOfSquares) {
  this->for_lengths([&](std::size_t count) {
    const auto values = this->random_values(count, 1);
    long double expected = 0;
    for (const auto value : values) expected += static_cast<long double>(value) * value;
    EXPECT_NEAR(this->kernel.sum_of_squares(values.data(), count), static_cast<double>(expected), 1e-12 * (1 + count));
  });
}

TYPED_TEST(Update, ClipKeepsNaN) {
  std::vector<TypeParam> values{-3, -1, 0, 1, 3, NAN, INFINITY, -INFINITY};
  this->kernel.clip(values.data(), 2, values.size());
  const std::vector<TypeParam> expected{-2, -1, 0, 1, 2, NAN, 2, -2};
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(values[i]));
    } else {
      EXPECT_EQ(values[i], expected[i]);
    }
  }
}

TYPED_TEST(Update, Momentum) {
  for (const bool nesterov : {false, true}) {
    this->for_lengths([&](std::size_t count) {
      auto value = this->random_values(count, 1);
      const auto gradient = this->random_values(count, 2);
      auto velocity = this->random_values(count, 3);
      std::vector<long double> expected_value, expected_velocity;
      for (std::size_t i = 0; i < count; ++i) {
        const long double v = velocity[i] * 0.9L - gradient[i] * 0.1L;
        expected_velocity.push_back(v);
        expected_value.push_back(value[i] + (nesterov ? v * 0.9L - gradient[i] * 0.1L : v));
      }
      this->kernel.sgd_momentum(value.data(), gradient.data(), velocity.data(), {0.1, 0.9, nesterov}, count);
      this->expect_near(value, expected_value);
      this->expect_near(velocity, expected_velocity);
    });
  }
}

TYPED_TEST(Update, Adam) {
  for (const bool amsgrad : {false, true}) {
    this->for_lengths([&](std::size_t count) {
      auto value = this->random_values(count, 1);
      const auto gradient = this->random_values(count, 2);
      auto m = this->random_values(count, 3);
      auto v = this->random_values(count, 4, 0.1, 1);
      auto largest = this->random_values(count, 5, 0.1, 1);
      std::vector<long double> expected;
      for (std::size_t i = 0; i < count; ++i) {
        const long double new_m = m[i] + (gradient[i] - static_cast<long double>(m[i])) * 0.1L;
        const long double new_v = v[i] + (static_cast<long double>(gradient[i]) * gradient[i] - v[i]) * 0.01L;
        const long double root = std::sqrt(amsgrad ? std::max<long double>(largest[i], new_v) : new_v);
        expected.push_back(value[i] - 0.05L * new_m / (root + 1e-3L));
      }
      this->kernel.adam(value.data(), gradient.data(), m.data(), v.data(), amsgrad ? largest.data() : nullptr,
                        {0.05, 0.1, 0.01, 1e-3}, count);
      this->expect_near(value, expected);
    });
  }
}

TYPED_TEST(Update, RMSpropAndAdagrad) {
  this->for_lengths([&](std::size_t count) {
    auto value = this->random_values(count, 1);
    const auto gradient = this->random_values(count, 2);
    auto square = this->random_values(count, 3, 0.1, 1);
    auto mean = this->random_values(count, 4, -0.1, 0.1);
    auto velocity = this->random_values(count, 5);
    std::vector<long double> expected;
    for (std::size_t i = 0; i < count; ++i) {
      const long double g = gradient[i];
      const long double s = 0.9L * square[i] + 0.1L * g * g;
      const long double a = 0.9L * mean[i] + 0.1L * g;
      expected.push_back(value[i] - (0.5L * velocity[i] + 0.05L * g / std::sqrt(s + 1e-2L - a * a)));
    }
    this->kernel.rmsprop(value.data(), gradient.data(), square.data(), mean.data(), velocity.data(),
                         {0.05, 0.9, 0.5, 1e-2}, count);
    this->expect_near(value, expected);

    auto accumulator = this->random_values(count, 6, 0.1, 1);
    for (std::size_t i = 0; i < count; ++i) {
      const long double g = gradient[i];
      expected[i] = value[i] - 0.05L * g / std::sqrt(accumulator[i] + g * g + 1e-2L);
    }
    this->kernel.adagrad(value.data(), gradient.data(), accumulator.data(), TypeParam(0.05), TypeParam(1e-2), count);
    this->expect_near(value, expected);
  });
}

}  // namespace
}  // namespace lockstep::kernels
