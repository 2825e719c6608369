// Compiled once for each kind of processor by Highway. Planes put neighbouring outputs of a row in a vector's lanes,
// images put channels there.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/pooling.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/pooling.h"
#include "kernels/windows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

using Best = Largest</*kFinite=*/false>;
Best nothing_yet(std::int64_t position) {
  return {hn::Set(kFloats, -std::numeric_limits<float>::infinity()),
          hn::Set(kInts, static_cast<std::int32_t>(position))};
}
void store_winner(Numbers winner, std::int64_t count, std::uint8_t* to) {
  const auto bytes = hn::DemoteTo(Bytes(), winner);
  if (count >= lanes()) return hn::StoreU(bytes, Bytes(), to);
  HWY_ALIGN std::uint8_t copy[hn::MaxLanes(kFloats)];
  hn::Store(bytes, Bytes(), copy);
  for (std::int64_t i = 0; i < count; ++i) to[i] = copy[i];
}

// One output, any geometry.
void max_one(const Pooling& p, const float* plane, std::int64_t row, std::int64_t column, float* output,
             std::uint8_t* winner) {
  const auto top = row * p.stride_h - p.padding_h, left = column * p.stride_w - p.padding_w;
  const auto rows = inside(top, p.size_h, p.dilation_h, p.in_h);
  const auto columns = inside(left, p.size_w, p.dilation_w, p.in_w);
  float best = -std::numeric_limits<float>::infinity();
  auto best_position = rows.begin * p.size_w + columns.begin;
  for (auto i = rows.begin; i < rows.end; ++i) {
    for (auto j = columns.begin; j < columns.end; ++j) {
      const float next = plane[(top + i * p.dilation_h) * p.in_w + left + j * p.dilation_w];
      if (next > best || std::isnan(next)) {
        best = next;
        best_position = i * p.size_w + j;
      }
    }
  }
  *output = best;
  if (winner != nullptr) *winner = static_cast<std::uint8_t>(best_position);
}

// The outputs [begin, end) of a row, whose windows lie between the left and right edges.
template <int kStride>
void max_row(const Pooling& p, const float* plane, std::int64_t row, Range columns, float* output,
             std::uint8_t* winner) {
  const auto top = row * p.stride_h - p.padding_h;
  const auto rows = inside(top, p.size_h, p.dilation_h, p.in_h);
  for (auto column = columns.begin; column < columns.end; column += lanes()) {
    const auto count = std::min(columns.end - column, lanes());
    const StridedLoad<kStride> load(count);
    auto best = nothing_yet(rows.begin * p.size_w);
    for (auto i = rows.begin; i < rows.end; ++i) {
      const float* from = plane + (top + i * p.dilation_h) * p.in_w + column * kStride - p.padding_w;
      for (std::int64_t j = 0; j < p.size_w; ++j) best.consider(load(from + j * p.dilation_w), i * p.size_w + j);
    }
    First(count).store(best.value, output + column);
    if (winner != nullptr) store_winner(best.position, count, winner + column);
  }
}

void max_planes(const Pooling& p, std::size_t planes, const float* input, float* output, std::uint8_t* winner) {
  const auto columns = columns_inside(p);
  const auto row_of = p.stride_w == 1 ? &max_row<1> : &max_row<2>;
  for (std::size_t plane = 0; plane < planes; ++plane, input += p.in_h * p.in_w) {
    for (std::int64_t row = 0; row < p.out_h; ++row) {
      const auto one = [&](std::int64_t column) {
        max_one(p, input, row, column, output + column, winner == nullptr ? nullptr : winner + column);
      };
      for (std::int64_t column = 0; column < columns.begin; ++column) one(column);
      row_of(p, input, row, columns, output, winner);
      for (auto column = columns.end; column < p.out_w; ++column) one(column);
      output += p.out_w;
      if (winner != nullptr) winner += p.out_w;
    }
  }
}

void max_images(const Pooling& p, std::size_t images, std::size_t channels, const float* input, float* output,
                std::uint8_t* winner) {
  const auto depth = static_cast<std::int64_t>(channels);
  for (std::size_t image = 0; image < images; ++image, input += p.in_h * p.in_w * depth) {
    for (std::int64_t row = 0; row < p.out_h; ++row) {
      const auto top = row * p.stride_h - p.padding_h;
      const auto rows = inside(top, p.size_h, p.dilation_h, p.in_h);
      for (std::int64_t column = 0; column < p.out_w; ++column) {
        const auto left = column * p.stride_w - p.padding_w;
        const auto columns = inside(left, p.size_w, p.dilation_w, p.in_w);
        for (std::int64_t c = 0; c < depth; c += lanes()) {
          const First some(depth - c);
          auto best = nothing_yet(rows.begin * p.size_w + columns.begin);
          for (auto i = rows.begin; i < rows.end; ++i) {
            const float* from = input + ((top + i * p.dilation_h) * p.in_w + left) * depth + c;
            for (auto j = columns.begin; j < columns.end; ++j) {
              best.consider(some.load(from + j * p.dilation_w * depth), i * p.size_w + j);
            }
          }
          some.store(best.value, output + c);
          if (winner != nullptr) store_winner(best.position, depth - c, winner + c);
        }
        output += depth;
        if (winner != nullptr) winner += depth;
      }
    }
  }
}

// Windows of 2 x 2 that tile the image: every element of the two rows below an output row is written, without zeroing.
void backward_tiles_of_2(const Pooling& p, const float* grad_output, const std::uint8_t* winner, float* grad_input) {
  const auto low = doubling(kFloats, 0), high = doubling(kFloats, lanes() / 2);
  const auto low_winner = doubling(kInts, 0), high_winner = doubling(kInts, lanes() / 2);
  const auto odd = hn::And(hn::Iota(kInts, 0), hn::Set(kInts, 1));
  const auto below = hn::Add(odd, hn::Set(kInts, 2));
  const auto store = [&](Vector gradient, Numbers won, std::int64_t column, float* rows) {
    const First some(2 * p.out_w - column);
    const auto part = [&](Numbers position) {
      return hn::IfThenElseZero(hn::RebindMask(kFloats, hn::Eq(won, position)), gradient);
    };
    some.store(part(odd), rows + column);
    some.store(part(below), rows + p.in_w + column);
  };
  for (std::int64_t row = 0; row < p.out_h; ++row) {
    for (std::int64_t column = 0; column < p.out_w; column += lanes()) {
      const First some(p.out_w - column);
      const auto gradient = some.load(grad_output + column);
      const auto won = hn::PromoteTo(kInts, hn::LoadU(Bytes(), winner + column));
      store(hn::TableLookupLanes(gradient, low), hn::TableLookupLanes(won, low_winner), 2 * column, grad_input);
      store(hn::TableLookupLanes(gradient, high), hn::TableLookupLanes(won, high_winner), 2 * column + lanes(),
            grad_input);
    }
    for (auto column = 2 * p.out_w; column < p.in_w; ++column) grad_input[column] = grad_input[p.in_w + column] = 0;
    grad_output += p.out_w;
    winner += p.out_w;
    grad_input += 2 * p.in_w;
  }
  std::fill_n(grad_input, (p.in_h - 2 * p.out_h) * p.in_w, 0.0F);
}

void backward_anything(const Pooling& p, const float* grad_output, const std::uint8_t* winner, float* grad_input) {
  std::int64_t offset[256];  // of each position from its window's corner
  for (std::int64_t k = 0; k < p.size_h * p.size_w; ++k) {
    offset[k] = k / p.size_w * p.dilation_h * p.in_w + k % p.size_w * p.dilation_w;
  }
  std::fill_n(grad_input, p.in_h * p.in_w, 0.0F);
  for (std::int64_t row = 0; row < p.out_h; ++row) {
    const auto corner = (row * p.stride_h - p.padding_h) * p.in_w - p.padding_w;
    for (std::int64_t column = 0; column < p.out_w; ++column) {
      grad_input[corner + column * p.stride_w + offset[*winner++]] += *grad_output++;
    }
  }
}

void max_planes_backward(const Pooling& p, std::size_t planes, const float* grad_output, const std::uint8_t* winner,
                         float* grad_input) {
  const bool tiles_of_2 =
      lanes() > 1 && p.tiles() && p.size_h == 2 && p.size_w == 2 && p.stride_h == 2 && p.stride_w == 2;
  const auto backward = tiles_of_2 ? &backward_tiles_of_2 : &backward_anything;
  for (std::size_t plane = 0; plane < planes; ++plane) {
    backward(p, grad_output, winner, grad_input);
    grad_output += p.out_h * p.out_w;
    winner += p.out_h * p.out_w;
    grad_input += p.in_h * p.in_w;
  }
}

void max_images_backward(const Pooling& p, std::size_t images, std::size_t channels, const float* grad_output,
                         const std::uint8_t* winner, float* grad_input) {
  const auto depth = static_cast<std::int64_t>(channels);
  const bool tiles = p.tiles();
  const bool covers = tiles && p.out_h * p.size_h == p.in_h && p.out_w * p.size_w == p.in_w;
  for (std::size_t image = 0; image < images; ++image, grad_input += p.in_h * p.in_w * depth) {
    if (!covers) std::fill_n(grad_input, p.in_h * p.in_w * depth, 0.0F);
    for (std::int64_t row = 0; row < p.out_h; ++row) {
      const auto top = row * p.stride_h - p.padding_h;
      const auto rows = inside(top, p.size_h, p.dilation_h, p.in_h);
      for (std::int64_t column = 0; column < p.out_w; ++column, grad_output += depth, winner += depth) {
        const auto left = column * p.stride_w - p.padding_w;
        const auto columns = inside(left, p.size_w, p.dilation_w, p.in_w);
        for (std::int64_t c = 0; c < depth; c += lanes()) {
          const First some(depth - c);
          const auto gradient = some.load(grad_output + c);
          const auto won = hn::PromoteTo(kInts, hn::LoadU(Bytes(), winner + c));
          for (auto i = rows.begin; i < rows.end; ++i) {
            float* to = grad_input + ((top + i * p.dilation_h) * p.in_w + left) * depth + c;
            for (auto j = columns.begin; j < columns.end; ++j) {
              const auto position = hn::Set(kInts, static_cast<std::int32_t>(i * p.size_w + j));
              float* at = to + j * p.dilation_w * depth;
              auto part = hn::IfThenElseZero(hn::RebindMask(kFloats, hn::Eq(won, position)), gradient);
              if (!tiles) part = hn::Add(part, some.load(at));
              some.store(part, at);
            }
          }
        }
      }
    }
  }
}

// Averages.

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

void average_planes(const Pooling& p, std::size_t count, const float* input, float factor, float* output) {
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

void average_planes_backward(const Pooling& p, std::size_t count, const float* grad_output, float factor,
                             float* grad_input) {
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

constexpr PoolingKernels kTable = {max_planes,          max_images,     max_planes_backward,
                                   max_images_backward, average_planes, average_planes_backward};
const PoolingKernels* table() { return &kTable; }

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table);

const PoolingKernels& pooling_kernels() { return *HWY_DYNAMIC_DISPATCH(table)(); }

}  // namespace lockstep::kernels
#endif
