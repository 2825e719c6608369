// Compiled once for each kind of processor by Highway. Neighbouring outputs of a row lie in a vector's lanes.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/average_pooling.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <algorithm>

#include "kernels/pooling.h"
#include "kernels/windows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

float sum_one(const Pooling& p, const float* corner) {
  float sum = 0;
  for (std::int64_t i = 0; i < p.size_h; ++i) {
    for (std::int64_t j = 0; j < p.size_w; ++j) sum += corner[i * p.in_w + j];
  }
  return sum;
}

template <int kStride>
void average_row(const Pooling& p, const float* rows, std::int64_t columns, float factor, float* output) {
  for (std::int64_t column = 0; column < columns; column += lanes()) {
    const StridedLoad<kStride> load(std::min(columns - column, lanes()));
    auto sum = hn::Zero(kFloats);
    for (std::int64_t i = 0; i < p.size_h; ++i) {
      for (std::int64_t j = 0; j < p.size_w; ++j) sum = hn::Add(sum, load(rows + i * p.in_w + column * kStride + j));
    }
    First(columns - column).store(hn::Mul(sum, hn::Set(kFloats, factor)), output + column);
  }
}

void planes(const Pooling& p, std::size_t count, const float* input, float factor, float* output) {
  const auto vectors = columns_inside(p);  // all outputs, or none
  const auto row_of = p.stride_w == 1 ? &average_row<1> : &average_row<2>;
  for (std::size_t plane = 0; plane < count; ++plane, input += p.in_h * p.in_w) {
    for (std::int64_t row = 0; row < p.out_h; ++row, output += p.out_w) {
      const float* rows = input + row * p.stride_h * p.in_w;
      row_of(p, rows, vectors.end - vectors.begin, factor, output);
      for (auto column = vectors.end - vectors.begin; column < p.out_w; ++column) {
        output[column] = sum_one(p, rows + column * p.stride_w) * factor;
      }
    }
  }
}

// Windows that tile the plane, 2 wide: each gradient is stored twice in each of the window's rows.
void spread_row_of_2(const Pooling& p, const float* grad_output, float factor, float* grad_row) {
  const auto low = doubling(kFloats, 0), high = doubling(kFloats, lanes() / 2);
  for (std::int64_t column = 0; column < p.out_w; column += lanes()) {
    const auto gradient = hn::Mul(First(p.out_w - column).load(grad_output + column), hn::Set(kFloats, factor));
    First(2 * (p.out_w - column)).store(hn::TableLookupLanes(gradient, low), grad_row + 2 * column);
    First(2 * (p.out_w - column) - lanes())
        .store(hn::TableLookupLanes(gradient, high), grad_row + 2 * column + lanes());
  }
}

void spread_row(const Pooling& p, const float* grad_output, float factor, float* grad_row) {
  for (std::int64_t column = 0; column < p.out_w; ++column) {
    for (std::int64_t j = 0; j < p.size_w; ++j) grad_row[column * p.stride_w + j] += grad_output[column] * factor;
  }
}

void planes_backward(const Pooling& p, std::size_t count, const float* grad_output, float factor, float* grad_input) {
  const bool in_twos = lanes() > 1 && p.tiles() && p.size_w == 2 && p.stride_w == 2;
  const auto spread = in_twos ? &spread_row_of_2 : &spread_row;
  for (std::size_t plane = 0; plane < count; ++plane, grad_input += p.in_h * p.in_w) {
    std::fill_n(grad_input, p.in_h * p.in_w, 0.0F);
    for (std::int64_t row = 0; row < p.out_h; ++row, grad_output += p.out_w) {
      for (std::int64_t i = 0; i < p.size_h; ++i) {
        spread(p, grad_output, factor, grad_input + (row * p.stride_h + i) * p.in_w);
      }
    }
  }
}

constexpr AveragePoolingKernels kTable = {planes, planes_backward};
const AveragePoolingKernels* table() { return &kTable; }

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table);

const AveragePoolingKernels& average_pooling_kernels() { return *HWY_DYNAMIC_DISPATCH(table)(); }

}  // namespace lockstep::kernels
#endif
