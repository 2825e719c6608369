#include <ATen/ATen.h>

#include "train/layers/padding.h"
#include "train/layers/parameter_module.h"

namespace lockstep {
namespace {

class Conv2DSpec final : public LayerSpec {
 public:
  Conv2DSpec(std::int64_t filters, Size2D kernel_size, Conv2DOptions options)
      : filters_(filters), window_{kernel_size, options.strides, options.dilation_rate}, options_(std::move(options)) {
    check_padding_name("Conv2D", options_.padding);
    require_positive("Conv2D: filters", filters);
    require_positive("Conv2D: groups", options_.groups);
    for (const auto& size : {window_.size, window_.strides, window_.dilation}) {
      require_positive("Conv2D: a kernel size, stride or dilation rate", std::min(size.height, size.width));
    }
  }

  std::string kind() const override { return "conv2d"; }

  BuiltLayer build(const Tensor& input) const override {
    require_dims("Conv2D", input, 4, "[batch, channels, height, width]");
    const auto channels = input.size(1);
    if (channels % options_.groups != 0 || filters_ % options_.groups != 0) {
      throw InvalidArgument(text("Conv2D: ", channels, " channels and ", filters_, " filters cannot be divided into ",
                                 options_.groups, " groups"));
    }
    auto module = std::make_shared<ParameterModule>();
    module->weight =
        module->make("weight", {filters_, channels / options_.groups, window_.size.height, window_.size.width},
                     options_.kernel_initializer);
    module->bias = module->make("bias", {filters_}, options_.bias_initializer, options_.use_bias);
    return {module, [module, window = window_, options = options_](const Tensor& x) {
              const auto padding = padding_of(options.padding, x, window);
              const bool inside = padding.symmetric();  // the convolution pads by itself, equally on both sides
              const auto padded = inside ? x : at::constant_pad_nd(x, padding.as_torch());
              const auto y = at::conv2d(padded, module->weight, module->bias, pair(window.strides),
                                        inside ? padding.before() : std::array<std::int64_t, 2>{},
                                        pair(window.dilation), options.groups);
              return options.activation(y);
            }};
  }

 private:
  std::int64_t filters_;
  Window window_;
  Conv2DOptions options_;
};

}  // namespace

Conv2D::Conv2D(std::int64_t filters, Size2D kernel_size, Conv2DOptions options)
    : Layer(std::make_shared<Conv2DSpec>(filters, kernel_size, std::move(options))) {}

}  // namespace lockstep
