#include "optimizer/flat_update.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/update.h"

namespace lockstep::optimizer {
namespace {

// With a gradient, a value and two states of 8 KiB each, a block stays in a first-level cache of 32 KiB.
constexpr std::size_t kBlockBytes = 8192;

}  // namespace

template <class T>
void sum_gradients(std::span<const T* const> gradients, const GradientScale& scale, T* output, std::size_t count) {
  const auto& kernel = kernels::update_kernels<T>();
  kernel.scaled_sum(gradients.data(), gradients.size(), static_cast<T>(1 / scale.divide_by), output, count);
  if (scale.clipvalue) kernel.clip(output, static_cast<T>(*scale.clipvalue), count);
}

template <class T>
void reduce_and_update(const Optimizer& optimizer, const UpdateStep& step, const GradientScale& scale,
                       const Piece<T>& piece) {
  constexpr std::size_t kBlock = kBlockBytes / sizeof(T);
  alignas(64) std::array<T, kBlock> sum;
  const bool as_it_is = piece.gradients.size() == 1 && scale.divide_by == 1 && !scale.clipvalue;
  std::vector<const T*> sources(piece.gradients.begin(), piece.gradients.end());
  std::vector<T*> state(piece.state.begin(), piece.state.end());
  const double decay = step.learning_rate * optimizer.options().weight_decay.value_or(0);

  for (std::size_t begin = 0; begin < piece.count; begin += kBlock) {
    const std::size_t count = std::min(kBlock, piece.count - begin);
    const T* gradient = as_it_is ? sources[0] : sum.data();
    if (!as_it_is) sum_gradients<T>(sources, scale, sum.data(), count);
    T* value = piece.copies[0] + begin;
    if (decay != 0) kernels::update_kernels<T>().scale(value, static_cast<T>(1 - decay), count);
    optimizer.rule().update(step, {value, count}, {gradient, count}, state);
    for (T* copy : piece.copies.subspan(1)) std::memcpy(copy + begin, value, count * sizeof(T));
    for (const T*& source : sources) source += count;
    for (T*& array : state) array += count;
  }
}

template void sum_gradients(std::span<const float* const>, const GradientScale&, float*, std::size_t);
template void sum_gradients(std::span<const double* const>, const GradientScale&, double*, std::size_t);
template void reduce_and_update(const Optimizer&, const UpdateStep&, const GradientScale&, const Piece<float>&);
template void reduce_and_update(const Optimizer&, const UpdateStep&, const GradientScale&, const Piece<double>&);

}  // namespace lockstep::optimizer
