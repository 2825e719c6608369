// The pooling kernels against plain loops, in arrays of exactly their sizes, so that sanitizers see a step beyond them.
#include "kernels/pooling.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "kernels/each_target_testing.h"

namespace lockstep::kernels {
namespace {

using Floats = std::vector<float>;

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(generator_() % static_cast<unsigned>(n)); }
  // Small integers: sums are exact, and many elements of a window are equal.
  Floats values(std::int64_t count) {
    Floats result(static_cast<std::size_t>(count));
    for (float& value : result) value = static_cast<float>(below(9) - 4);
    return result;
  }

 private:
  std::mt19937 generator_;
};

struct Image {
  std::int64_t channels, height, width;
  bool channels_last;

  std::size_t index(std::int64_t image, std::int64_t c, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(channels_last ? ((image * height + i) * width + j) * channels + c
                                                  : ((image * channels + c) * height + i) * width + j);
  }
};

Pooling random_pooling(Random& random) {
  Pooling p{.in_h = 6 + random.below(20),
            .in_w = 6 + random.below(40),
            .out_h = 0,
            .out_w = 0,
            .size_h = 1 + random.below(3),
            .size_w = 1 + random.below(3),
            .stride_h = 1 + random.below(3),
            .stride_w = 1 + random.below(3),
            .padding_h = 0,
            .padding_w = 0,
            .dilation_h = 1 + random.below(2),
            .dilation_w = 1 + random.below(2)};
  if (random.below(3) == 0) p.size_h = p.size_w = p.stride_h = p.stride_w = 2, p.dilation_h = p.dilation_w = 1;
  p.padding_h = random.below(p.size_h / 2 + 1);
  p.padding_w = random.below(p.size_w / 2 + 1);
  p.out_h = (p.in_h + 2 * p.padding_h - p.dilation_h * (p.size_h - 1) - 1) / p.stride_h + 1;
  p.out_w = (p.in_w + 2 * p.padding_w - p.dilation_w * (p.size_w - 1) - 1) / p.stride_w + 1;
  return p;
}

TEST(Pooling, MaximumAndItsGradient) {
  for_each_target([] {
    const auto& kernel = pooling_kernels();
    Random random(1);
    for (int round = 0; round < 60; ++round) {
      const auto p = random_pooling(random);
      const bool last = round % 2 == 0;
      const std::int64_t images = 1 + random.below(2), channels = 1 + random.below(37);
      const Image in{channels, p.in_h, p.in_w, last}, out{channels, p.out_h, p.out_w, last};
      const auto inputs = images * channels * p.in_h * p.in_w, outputs = images * channels * p.out_h * p.out_w;
      const auto input = random.values(inputs), gradient = random.values(outputs);

      Floats expected(gradient.size()), expected_gradient(input.size());
      for (std::int64_t n = 0; n < images; ++n) {
        for (std::int64_t c = 0; c < channels; ++c) {
          for (std::int64_t row = 0; row < p.out_h; ++row) {
            for (std::int64_t column = 0; column < p.out_w; ++column) {
              float best = -std::numeric_limits<float>::infinity();
              std::size_t winner = 0;
              for (std::int64_t k = 0; k < p.size_h * p.size_w; ++k) {
                const auto i = row * p.stride_h - p.padding_h + k / p.size_w * p.dilation_h;
                const auto j = column * p.stride_w - p.padding_w + k % p.size_w * p.dilation_w;
                if (i < 0 || j < 0 || i >= p.in_h || j >= p.in_w) continue;
                if (input[in.index(n, c, i, j)] > best) best = input[winner = in.index(n, c, i, j)];
              }
              expected[out.index(n, c, row, column)] = best;
              expected_gradient[winner] += gradient[out.index(n, c, row, column)];
            }
          }
        }
      }

      Floats output(expected.size()), grad_input(input.size(), 99);
      std::vector<std::uint8_t> winner(expected.size() + kWinnerSlack);
      const auto planes = static_cast<std::size_t>(images * channels);
      if (last) {
        const auto depth = static_cast<std::size_t>(channels);
        kernel.max_images(p, static_cast<std::size_t>(images), depth, input.data(), output.data(), winner.data());
        kernel.max_images_backward(p, static_cast<std::size_t>(images), depth, gradient.data(), winner.data(),
                                   grad_input.data());
      } else {
        kernel.max_planes(p, planes, input.data(), output.data(), winner.data());
        kernel.max_planes_backward(p, planes, gradient.data(), winner.data(), grad_input.data());
      }
      ASSERT_EQ(output, expected) << round;
      ASSERT_EQ(grad_input, expected_gradient) << round;
    }
  });
}

TEST(Pooling, AverageAndItsGradient) {
  for_each_target([] {
    const auto& kernel = pooling_kernels();
    Random random(3);
    for (int round = 0; round < 60; ++round) {
      auto p = random_pooling(random);
      p.padding_h = p.padding_w = 0;
      p.dilation_h = p.dilation_w = 1;
      p.out_h = (p.in_h - p.size_h) / p.stride_h + 1;
      p.out_w = (p.in_w - p.size_w) / p.stride_w + 1;
      const std::int64_t planes = 1 + random.below(3);
      const auto input = random.values(planes * p.in_h * p.in_w), gradient = random.values(planes * p.out_h * p.out_w);
      Floats expected(gradient.size()), expected_gradient(input.size());
      for (std::int64_t o = 0; o < planes * p.out_h * p.out_w; ++o) {
        const auto corner = o / (p.out_h * p.out_w) * p.in_h * p.in_w + o / p.out_w % p.out_h * p.stride_h * p.in_w +
                            o % p.out_w * p.stride_w;
        for (std::int64_t k = 0; k < p.size_h * p.size_w; ++k) {
          const auto at = static_cast<std::size_t>(corner + k / p.size_w * p.in_w + k % p.size_w);
          expected[static_cast<std::size_t>(o)] += input[at] * 0.5F;
          expected_gradient[at] += gradient[static_cast<std::size_t>(o)] * 0.5F;
        }
      }
      Floats output(expected.size()), grad_input(input.size(), 99);
      kernel.average_planes(p, static_cast<std::size_t>(planes), input.data(), 0.5F, output.data());
      kernel.average_planes_backward(p, static_cast<std::size_t>(planes), gradient.data(), 0.5F, grad_input.data());
      ASSERT_EQ(output, expected) << round;
      ASSERT_EQ(grad_input, expected_gradient) << round;
    }
  });
}

TEST(Pooling, AfterConvolutionAndReLU) {
  for_each_target([] {
    const auto& kernel = conv_pool_kernels();
    Random random(2);
    for (int round = 0; round < 40; ++round) {
      const ConvPool s{1 + random.below(3),  6 + random.below(12), 6 + random.below(12),
                       1 + random.below(40), 1 + random.below(4),  1 + random.below(4)};
      const std::int64_t images = 1 + random.below(3);
      const Image in{s.channels, s.in_h, s.in_w, false}, out{s.filters, s.out_h(), s.out_w(), false};
      const auto input = random.values(images * s.channels * s.in_h * s.in_w);
      const auto weight = random.values(s.filters * s.taps()), bias = random.values(s.filters);
      const auto gradient = random.values(images * s.filters * s.pixels());

      Floats expected(gradient.size()), expected_weight(weight.size()), expected_bias(bias.size());
      const auto tap = [&](std::int64_t n, std::int64_t t, std::int64_t i, std::int64_t j) {
        const auto place = t % (s.size_h * s.size_w);
        return input[in.index(n, t / (s.size_h * s.size_w), i + place / s.size_w, j + place % s.size_w)];
      };
      for (std::int64_t n = 0; n < images; ++n) {
        for (std::int64_t f = 0; f < s.filters; ++f) {
          for (std::int64_t pixel = 0; pixel < s.pixels(); ++pixel) {
            const auto row = pixel / s.out_w(), column = pixel % s.out_w();
            float best = 0;
            std::int64_t winner = -1;
            for (std::int64_t k = 0; k < 4; ++k) {
              float sum = bias[static_cast<std::size_t>(f)];
              for (std::int64_t t = 0; t < s.taps(); ++t) {
                sum +=
                    weight[static_cast<std::size_t>(f * s.taps() + t)] * tap(n, t, 2 * row + k / 2, 2 * column + k % 2);
              }
              if (sum > best) best = sum, winner = k;
            }
            expected[out.index(n, f, row, column)] = best;
            if (winner < 0) continue;
            const auto g = gradient[out.index(n, f, row, column)];
            expected_bias[static_cast<std::size_t>(f)] += g;
            for (std::int64_t t = 0; t < s.taps(); ++t) {
              expected_weight[static_cast<std::size_t>(f * s.taps() + t)] +=
                  g * tap(n, t, 2 * row + winner / 2, 2 * column + winner % 2);
            }
          }
        }
      }

      Floats output(expected.size()), grad_weight(weight.size(), 99), grad_bias(bias.size(), 99);
      std::vector<std::uint8_t> winner(static_cast<std::size_t>(images * kernel.winner_count(s)));
      const auto count = static_cast<std::size_t>(images);
      kernel.forward(s, count, input.data(), weight.data(), bias.data(), output.data(), winner.data());
      kernel.backward(s, count, input.data(), gradient.data(), winner.data(), grad_weight.data(), grad_bias.data());
      ASSERT_EQ(output, expected) << round;
      ASSERT_EQ(grad_weight, expected_weight) << round;
      ASSERT_EQ(grad_bias, expected_bias) << round;
    }
  });
}

}  // namespace
}  // namespace lockstep::kernels
