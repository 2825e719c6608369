#include "train/layers/pooling.h"

#include <ATen/ATen.h>

#include <limits>

#include "lockstep/ops/ops.h"

namespace lockstep {
namespace {

Tensor max_pool(const Tensor& x, const train::Window& window, const train::Padding& padding) {
  if (padding.symmetric())
    return at::max_pool2d(x, train::pair(window.size), train::pair(window.strides), padding.before());
  const auto padded = at::constant_pad_nd(x, padding.as_torch(), -std::numeric_limits<double>::infinity());
  return at::max_pool2d(padded, train::pair(window.size), train::pair(window.strides));
}

Tensor average_pool(const Tensor& x, const train::Window& window, const train::Padding& padding) {
  constexpr bool kCeil = false, kCountPadding = false;
  if (padding.none()) return ops::avg_pool2d(x, train::pair(window.size), train::pair(window.strides));
  if (padding.symmetric()) {
    return at::avg_pool2d(x, train::pair(window.size), train::pair(window.strides), padding.before(), kCeil,
                          kCountPadding);
  }
  // Returns sums, which are divided by the number of real elements in each window.
  const auto sum = [&](const Tensor& image) {
    return at::avg_pool2d(at::constant_pad_nd(image, padding.as_torch()), train::pair(window.size),
                          train::pair(window.strides), 0, kCeil, kCountPadding, /*divisor_override=*/1);
  };
  return sum(x) / sum(at::ones({1, 1, x.size(2), x.size(3)}, x.options()));
}

class GlobalAverageSpec final : public LayerSpec {
 public:
  std::string kind() const override { return "global_average_pooling2d"; }
  BuiltLayer build(const Tensor& input) const override {
    train::require_dims("GlobalAveragePooling2D", input, 4, "[batch, channels, height, width]");
    return {nullptr, [](const Tensor& x) { return x.mean({2, 3}); }};
  }
};

class FlattenSpec final : public LayerSpec {
 public:
  std::string kind() const override { return "flatten"; }
  BuiltLayer build(const Tensor&) const override {
    return {nullptr, [](const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(1) : x.flatten(1); }};
  }
};

}  // namespace

train::PoolingSpec::PoolingSpec(std::string kind, Pool pool, Size2D size, const Pooling2DOptions& options)
    : kind_(std::move(kind)),
      pool_(pool),
      window_{size, options.strides.height == 0 ? size : options.strides},
      padding_(options.padding) {
  train::check_padding_name(kind_.c_str(), padding_);
  train::require_positive("a pool size or stride",
                          std::min({size.height, size.width, window_.strides.height, window_.strides.width}));
}

BuiltLayer train::PoolingSpec::build(const Tensor& input) const {
  train::require_dims(kind_.c_str(), input, 4, "[batch, channels, height, width]");
  return {nullptr, [pool = pool_, window = window_, padding = padding_](const Tensor& x) {
            return pool(x, window, train::padding_of(padding, x, window));
          }};
}

MaxPooling2D::MaxPooling2D(Size2D pool_size, Pooling2DOptions options)
    : Layer(std::make_shared<train::PoolingSpec>("max_pooling2d", &max_pool, pool_size, options)) {}
AveragePooling2D::AveragePooling2D(Size2D pool_size, Pooling2DOptions options)
    : Layer(std::make_shared<train::PoolingSpec>("average_pooling2d", &average_pool, pool_size, options)) {}
GlobalAveragePooling2D::GlobalAveragePooling2D() : Layer(std::make_shared<GlobalAverageSpec>()) {}
Flatten::Flatten() : Layer(std::make_shared<FlattenSpec>()) {}

}  // namespace lockstep
