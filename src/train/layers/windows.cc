#include "train/layers/specs.h"

#include <ATen/ATen.h>

#include <limits>

#include "base/log.h"
#include "lockstep/ops/ops.h"

namespace lockstep {

namespace {

// On CPUs convolutions and pooling are fastest with channels last; the layers after these keep that order.
Tensor in_fastest_order(const Tensor& image) {
  return image.device().is_cpu() && image.size(1) > 1 ? image.contiguous(at::MemoryFormat::ChannelsLast) : image;
}

// Images in Keras's order [batch, height, width, channels] raise no error, but train badly.
void warn_of_channels_last(const Tensor& input) {
  const auto few = [](std::int64_t size) { return size == 1 || size == 3 || size == 4; };
  if (!few(input.size(3)) || few(input.size(1)) || input.size(1) != input.size(2)) return;
  log_warning(text("Conv2D: an input of ", input.size(1), " channels of ", input.size(2), " x ", input.size(3),
                   " looks like images with their channels last; Lockstep's are [batch, channels, height, width]: ",
                   "permute({2, 0, 1}) each one in a map"));
}

}  // namespace

train::Conv2DSpec::Conv2DSpec(std::int64_t filters, Size2D kernel_size, Conv2DOptions options)
    : filters_(filters), window_{kernel_size, options.strides, options.dilation_rate}, options_(std::move(options)) {
  train::check_padding_name("Conv2D", options_.padding);
  train::require_positive("Conv2D: filters", filters);
  train::require_positive("Conv2D: groups", options_.groups);
  for (const auto& size : {window_.size, window_.strides, window_.dilation}) {
    train::require_positive("Conv2D: a kernel size, stride or dilation rate", std::min(size.height, size.width));
  }
}

BuiltLayer train::Conv2DSpec::build(const Tensor& input) const {
  train::require_dims("Conv2D", input, 4, "[batch, channels, height, width]");
  const auto channels = input.size(1);
  warn_of_channels_last(input);
  if (channels % options_.groups != 0 || filters_ % options_.groups != 0) {
    throw InvalidArgument(text("Conv2D: ", channels, " channels and ", filters_, " filters cannot be divided into ",
                               options_.groups, " groups"));
  }
  auto module = std::make_shared<train::ParameterModule>();
  module->weight =
      module->make("weight", {filters_, channels / options_.groups, window_.size.height, window_.size.width},
                   options_.kernel_initializer);
  module->bias = module->make("bias", {filters_}, options_.bias_initializer, options_.use_bias);
  return {module, [module, window = window_, options = options_](const Tensor& x) {
            auto padding = train::padding_of(options.padding, x, window);
            const auto image = train::pad_unevenly(x, padding);
            const auto y =
                at::conv2d(in_fastest_order(image), module->weight, module->bias, train::pair(window.strides),
                           padding.before(), train::pair(window.dilation), options.groups);
            return options.activation(y);
          }};
}

Conv2D::Conv2D(std::int64_t filters, Size2D kernel_size, Conv2DOptions options)
    : Layer(std::make_shared<train::Conv2DSpec>(filters, kernel_size, std::move(options))) {}

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

GlobalAveragePooling2D::GlobalAveragePooling2D()
    : Layer(train::spec_of("global_average_pooling2d", [](const Tensor& input) {
        train::require_dims("GlobalAveragePooling2D", input, 4, "[batch, channels, height, width]");
        return BuiltLayer{nullptr, [](const Tensor& x) { return x.mean({2, 3}); }};
      })) {}

Flatten::Flatten()
    : Layer(train::spec_of("flatten", [](const Tensor&) {
        return BuiltLayer{nullptr, [](const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(1) : x.flatten(1); }};
      })) {}

}  // namespace lockstep
