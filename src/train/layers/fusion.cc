#include "train/layers/fusion.h"

#include "lockstep/ops/ops.h"
#include "train/layers/conv2d.h"
#include "train/layers/pooling.h"

namespace lockstep::train {
namespace {

bool is(const Size2D& size, std::int64_t both) { return size.height == both && size.width == both; }

// Returns the layer's spec, where it is a T.
template <class T>
const T* as(const std::vector<Layer>& layers, std::size_t i) {
  return i < layers.size() ? dynamic_cast<const T*>(&layers[i].spec()) : nullptr;
}

bool relu_of_plain_convolution(const Conv2DSpec& conv) {
  return conv.options().activation.name() == "relu" && conv.options().groups == 1 && is(conv.window().strides, 1) &&
         is(conv.window().dilation, 1);
}

bool max_pooling_by_two(const PoolingSpec& pool) {
  return pool.kind() == "max_pooling2d" && pool.padding() == "valid" && is(pool.window().size, 2) &&
         is(pool.window().strides, 2);
}

}  // namespace

Fused fuse(const std::vector<Layer>& layers, const std::vector<BuiltLayer>& built, std::size_t i) {
  const auto* conv = as<Conv2DSpec>(layers, i);
  const auto* pool = as<PoolingSpec>(layers, i + 1);
  if (conv != nullptr && pool != nullptr && relu_of_plain_convolution(*conv) && max_pooling_by_two(*pool)) {
    const auto module = std::static_pointer_cast<ParameterModule>(built[i].module);
    return {[module, window = conv->window(), padding = conv->options().padding](const Tensor& x) {
              const auto image = pad_unevenly(x, padding_of(padding, x, window));
              return ops::conv2d_relu_max_pool2d(image.x, module->weight, module->bias, image.padding);
            },
            2};
  }
  return {built[i].forward};
}

}  // namespace lockstep::train
