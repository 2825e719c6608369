// Pooling. A window's elements are as many slices of x, between which the largest is taken: its first one where several
// are equal, as LibTorch does.
#include <functional>
#include <limits>

#include "base/text.h"
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

// Windows that move over rows and columns, the last two dimensions of x.
struct Pool {
  Sizes kernel, stride, padding, dilation;
  bool ceil;
  Sizes low, high, outputs;  // the padding that the windows need, and their number
};

Sizes pair_in(Call& call, std::size_t place, const Sizes& otherwise) {
  auto numbers = call.integers(place);
  if (numbers.empty()) return otherwise;
  if (numbers.size() == 1) numbers.push_back(numbers[0]);
  return numbers;
}

// The windows on x of `sizes`, by the arguments from place `i` on: kernel, stride, padding, dilation if there is one,
// ceil.
Pool pool_in(Call& call, std::size_t i, bool has_dilation, const Sizes& sizes) {
  const auto kernel = pair_in(call, i, {});
  const auto dilation = has_dilation ? pair_in(call, i + 3, {1, 1}) : Sizes{1, 1};
  const bool ceil = call.flag(i + (has_dilation ? 4 : 3));
  Pool pool{kernel, pair_in(call, i + 1, kernel), pair_in(call, i + 2, {0, 0}), dilation, ceil, {}, {}, {}};
  for (std::size_t k = 0; k < 2; ++k) {
    const auto size = sizes[sizes.size() - 2 + k], reach = dilation[k] * (kernel[k] - 1) + 1;
    const auto stride = pool.stride[k], padding = pool.padding[k], room = size + 2 * padding - reach;
    auto count = (ceil ? room + stride - 1 : room) / stride + 1;
    if (ceil && (count - 1) * stride >= size + padding) --count;  // the last window begins inside
    pool.outputs.push_back(count);
    pool.low.push_back(padding);
    pool.high.push_back(std::max<std::int64_t>((count - 1) * stride + reach - size - padding, 0));
  }
  return pool;
}

Sizes at_end(const Sizes& last_two, std::size_t rank, std::int64_t others = 0) {
  Sizes all(rank, others);
  all[rank - 2] = last_two[0];
  all[rank - 1] = last_two[1];
  return all;
}

// Element (row, column) of each window.
Value element(Call& call, const Value& padded, const Pool& pool, std::int64_t row, std::int64_t column) {
  const auto rank = padded.shape.sizes.size();
  const Sizes begin{row * pool.dilation[0], column * pool.dilation[1]};
  auto end = padded.shape.sizes;
  for (std::size_t i = 0; i < 2; ++i) end[rank - 2 + i] = begin[i] + (pool.outputs[i] - 1) * pool.stride[i] + 1;
  return call.program().slice(padded, at_end(begin, rank), end, at_end(pool.stride, rank, 1));
}

// Zeros of x's sizes, with `values` at element (row, column) of each window.
Value put_back(Call& call, const Value& values, const Pool& pool, const Sizes& sizes, std::int64_t row,
               std::int64_t column) {
  const auto rank = sizes.size();
  Sizes low{row * pool.dilation[0] - pool.low[0], column * pool.dilation[1] - pool.low[1]}, high, between;
  for (std::size_t i = 0; i < 2; ++i) {
    between.push_back(pool.stride[i] - 1);
    high.push_back(sizes[rank - 2 + i] - low[i] - ((pool.outputs[i] - 1) * pool.stride[i] + 1));
  }
  return call.program().pad(values, 0, at_end(low, rank), at_end(high, rank), at_end(between, rank));
}

void for_each_element(const Pool& pool, const std::function<void(std::int64_t, std::int64_t)>& act) {
  for (std::int64_t row = 0; row < pool.kernel[0]; ++row)
    for (std::int64_t column = 0; column < pool.kernel[1]; ++column) act(row, column);
}

Value padded_with(Call& call, const Value& x, const Pool& pool, double with) {
  const auto rank = x.shape.sizes.size();
  return call.program().pad(x, with, at_end(pool.low, rank), at_end(pool.high, rank), Sizes(rank));
}

// True where windows lie side by side, so that x can be reshaped into them. Compilers make one loop of that.
bool is_tiling(const Pool& pool) {
  return pool.stride == pool.kernel && pool.padding == Sizes{0, 0} && pool.dilation == Sizes{1, 1} && !pool.ceil;
}

// x divided into windows: the dimensions of its rows and columns, which may be anywhere, become two each.
struct Tiles {
  std::size_t row, column;  // dimensions of x; row < column
  Sizes whole;              // of x without the rows and columns that no window has
  Sizes split;              // [.., windows, window rows, .., windows, window columns, ..]
  Sizes outputs;            // [.., windows, .., windows, ..]

  std::size_t split_row() const { return row; }
  std::size_t split_column() const { return column + 1; }

  // The dimensions of `outputs` in `split`.
  Sizes windows() const {
    Sizes dimensions;
    for (std::size_t i = 0; i < outputs.size(); ++i)
      dimensions.push_back(static_cast<std::int64_t>(i + (i > row ? 1 : 0) + (i > column ? 1 : 0)));
    return dimensions;
  }
};
Tiles tiles_of(const Pool& pool, const Sizes& sizes, std::size_t row, std::size_t column) {
  Tiles tiles{row, column, {}, {}, {}};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (i != row && i != column) {
      for (auto* const list : {&tiles.whole, &tiles.split, &tiles.outputs}) list->push_back(sizes[i]);
      continue;
    }
    const std::size_t which = i == row ? 0 : 1;
    const auto windows = pool.outputs[which];
    tiles.whole.push_back(windows * pool.kernel[which]);
    tiles.split.insert(tiles.split.end(), {windows, pool.kernel[which]});
    tiles.outputs.push_back(windows);
  }
  return tiles;
}

// Returns x in its order in memory where rows come before columns there, else in its logical order.
pjrt::ProgramText::Order order_for_tiles(Call& call, const Value& x) {
  const auto order = call.program().order_of(x);
  const auto rank = x.shape.sizes.size();
  if (order.permutation[rank - 2] < order.permutation[rank - 1]) return order;
  return {x, all_dimensions(rank)};
}

// Where an element of a window lies in x: row * columns + column, of a window that iotas count.
Value place_in_window(Call& call, const Pool& pool, std::int64_t columns, const Value& row, const Value& column,
                      std::size_t row_dimension, std::size_t column_dimension) {
  auto& program = call.program();
  const auto& shape = row.shape;
  const auto scaled = [&](const Value& value, std::int64_t by) {
    return program.times(value, program.integer(by, shape));
  };
  const auto window = [&](std::size_t dimension) { return program.iota(shape, static_cast<std::int64_t>(dimension)); };
  const auto rows = program.plus(scaled(window(row_dimension), pool.kernel[0]), row);
  return program.plus(scaled(rows, columns), program.plus(scaled(window(column_dimension), pool.kernel[1]), column));
}

void max_pool_of_tiles(Call& call, const Value& logical, const Pool& pool) {
  auto& program = call.program();
  const auto [x, order] = order_for_tiles(call, logical);
  const auto rank = x.shape.sizes.size();
  const auto tiles = tiles_of(pool, x.shape.sizes, static_cast<std::size_t>(order[rank - 2]),
                              static_cast<std::size_t>(order[rank - 1]));
  const auto split = program.reshape(program.slice(x, Sizes(rank), tiles.whole, Sizes(rank, 1)), tiles.split);
  const Shape numbers{DType::int32, tiles.outputs};
  std::optional<Value> largest, row_of, column_of;
  for_each_element(pool, [&](std::int64_t row, std::int64_t column) {
    Sizes begin(tiles.split.size()), end = tiles.split;
    begin[tiles.split_row() + 1] = row;
    end[tiles.split_row() + 1] = row + 1;
    begin[tiles.split_column() + 1] = column;
    end[tiles.split_column() + 1] = column + 1;
    const auto value = program.reshape(program.slice(split, begin, end, Sizes(begin.size(), 1)), tiles.outputs);
    const auto here_row = program.integer(row, numbers), here_column = program.integer(column, numbers);
    if (!largest) {
      largest = value;
      row_of = here_row;
      column_of = here_column;
      return;
    }
    const auto larger =
        program.binary("stablehlo.or", program.compare("GT", value, *largest), program.compare("NE", value, value));
    largest = program.select(larger, value, *largest);
    row_of = program.select(larger, here_row, *row_of);
    column_of = program.select(larger, here_column, *column_of);
  });
  const auto place =
      place_in_window(call, pool, logical.shape.sizes.back(), *row_of, *column_of, tiles.row, tiles.column);
  call.returns({program.transpose(*largest, order), program.transpose(program.convert(place, DType::int64), order)});
}

void max_pool_of_tiles_backward(Call& call, const Value& gradient, const Value& logical, const Value& places,
                                const Pool& pool) {
  auto& program = call.program();
  const auto [x, order] = order_for_tiles(call, logical);
  const auto rank = x.shape.sizes.size();
  const auto tiles = tiles_of(pool, x.shape.sizes, static_cast<std::size_t>(order[rank - 2]),
                              static_cast<std::size_t>(order[rank - 1]));
  const auto back = pjrt::inverse(order);
  const auto spread_out = [&](const Value& value) {
    return program.broadcast(program.transpose(value, back), tiles.split, tiles.windows());
  };
  const Shape numbers{DType::int32, tiles.split};
  const auto inner = [&](std::size_t dimension) { return program.iota(numbers, static_cast<std::int64_t>(dimension)); };
  const auto here = place_in_window(call, pool, logical.shape.sizes.back(), inner(tiles.split_row() + 1),
                                    inner(tiles.split_column() + 1), tiles.split_row(), tiles.split_column());
  const auto is_largest = program.compare("EQ", spread_out(program.convert(places, DType::int32)), here);
  const auto shares =
      program.select(is_largest, spread_out(gradient), program.constant(0, {gradient.shape.dtype, tiles.split}));
  Sizes high(rank);
  for (std::size_t i = 0; i < rank; ++i) high[i] = x.shape.sizes[i] - tiles.whole[i];
  const auto whole = program.reshape(shares, tiles.whole);
  call.returns({program.transpose(
      tiles.whole == x.shape.sizes ? whole : program.pad(whole, 0, Sizes(rank), high, Sizes(rank)), order)});
}

// True where TPUs have units for the windows: not with dilation.
bool has_windows(Call& call, const Pool& pool) { return !call.is_for_cpu() && pool.dilation == Sizes{1, 1}; }

std::string window_of(const Pool& pool, std::size_t rank) {
  std::string padding;
  const auto low = at_end(pool.low, rank), high = at_end(pool.high, rank);
  for (std::size_t i = 0; i < rank; ++i) padding += text(i == 0 ? "" : ", ", "[", low[i], ", ", high[i], "]");
  return text("window_dimensions = ", pjrt::array_of(at_end(pool.kernel, rank, 1)),
              ", window_strides = ", pjrt::array_of(at_end(pool.stride, rank, 1)), ", padding = dense<[", padding,
              "]> : tensor<", rank, "x2xi64>");
}

Value max_of_windows(Call& call, const Value& x, const Pool& pool) {
  auto& program = call.program();
  auto sizes = x.shape.sizes;
  std::copy(pool.outputs.begin(), pool.outputs.end(), sizes.end() - 2);
  return program.add("stablehlo.reduce_window", {x, program.lowest({x.shape.dtype, {}})}, {x.shape.dtype, sizes},
                     window_of(pool, sizes.size()), pjrt::reducer("stablehlo.maximum", x.shape.dtype));
}

// The first of several largest elements gets the gradient.
Value gradient_of_windows(Call& call, const Value& gradient, const Value& x, const Pool& pool) {
  const Shape scalar{x.shape.dtype, {}};
  const auto stays =
      pjrt::ProgramText::region({scalar, scalar}, [](pjrt::ProgramText& inside, const std::vector<Value>& both) {
        return std::vector<Value>{inside.compare("GE", both[0], both[1])};
      });
  auto& program = call.program();
  return program.add("stablehlo.select_and_scatter", {x, gradient, program.constant(0, scalar)}, x.shape,
                     window_of(pool, x.shape.sizes.size()),
                     text(stays, ", ", pjrt::reducer("stablehlo.add", x.shape.dtype)));
}

// Also returns where the largest elements are: row * columns + column of x.
void max_pool(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0);
  const auto pool = pool_in(call, 1, true, x.shape.sizes);
  if (is_tiling(pool) && call.is_for_cpu()) return max_pool_of_tiles(call, x, pool);
  const auto padded = padded_with(call, x, pool, -std::numeric_limits<double>::infinity());
  const Shape places{DType::int64, padded.shape.sizes};
  const auto rank = static_cast<std::int64_t>(x.shape.sizes.size());
  const auto shifted = [&](std::int64_t dimension, std::int64_t by, std::int64_t times) {
    const auto from_zero =
        program.minus(program.iota(places, dimension), program.constant(static_cast<double>(by), places));
    return program.times(from_zero, program.constant(static_cast<double>(times), places));
  };
  const auto all_places =
      program.plus(shifted(rank - 2, pool.low[0], x.shape.sizes.back()), shifted(rank - 1, pool.low[1], 1));
  const auto either = [&](const Value& a, const Value& b) { return program.binary("stablehlo.or", a, b); };
  const bool has_padding = padded.shape.sizes != x.shape.sizes;
  const auto inside = padded_with(call, program.constant(1, {DType::boolean, x.shape.sizes}), pool, 0);
  Value largest, place, found;
  for_each_element(pool, [&](std::int64_t row, std::int64_t column) {
    const auto value = element(call, padded, pool, row, column);
    const auto at = element(call, all_places, pool, row, column);
    const auto is_inside = has_padding ? element(call, inside, pool, row, column) : Value();
    if (largest.name.empty()) {
      largest = value;
      place = at;
      found = is_inside;
      return;
    }
    auto larger = either(program.compare("GT", value, largest), program.compare("NE", value, value));
    if (has_padding) {  // which is as small as -infinity: the first element beside it is taken too
      larger = either(larger, program.binary("stablehlo.and", is_inside, program.unary("stablehlo.not", found)));
      found = either(found, is_inside);
    }
    largest = program.select(larger, value, largest);
    place = program.select(larger, at, place);
  });
  // Compilers leave out what nobody uses: on TPUs the places.
  call.returns({has_windows(call, pool) ? max_of_windows(call, x, pool) : largest, place});
}

// Each element of x gets the gradients of the windows whose largest it is.
void max_pool_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), x = call.value(1), places = call.value(7);
  const auto pool = pool_in(call, 2, true, x.shape.sizes);
  if (is_tiling(pool) && call.is_for_cpu()) return max_pool_of_tiles_backward(call, gradient, x, places, pool);
  if (has_windows(call, pool)) return call.returns({gradient_of_windows(call, gradient, x, pool)});
  const auto rank = static_cast<std::int64_t>(x.shape.sizes.size());
  Value sum = program.constant(0, x.shape);
  for_each_element(pool, [&](std::int64_t row, std::int64_t column) {
    // Where this element of a window lies in x.
    const auto along = [&](std::size_t i, std::int64_t offset, std::int64_t times) {
      const auto steps = program.iota(places.shape, rank - 2 + static_cast<std::int64_t>(i));
      const auto scaled =
          program.times(steps, program.constant(static_cast<double>(pool.stride[i] * times), places.shape));
      const auto begin = static_cast<double>((offset * pool.dilation[i] - pool.low[i]) * times);
      return program.plus(scaled, program.constant(begin, places.shape));
    };
    const auto here = program.plus(along(0, row, x.shape.sizes.back()), along(1, column, 1));
    const auto is_largest = program.compare("EQ", places, here);
    const auto share = program.select(is_largest, gradient, program.constant(0, gradient.shape));
    sum = program.plus(sum, put_back(call, share, pool, x.shape.sizes, row, column));
  });
  call.returns({sum});
}

// By how much a window's sum is divided: by its elements that are in x, with or without the padding, [outputs].
Value divisors(Call& call, const Pool& pool, const Sizes& sizes, std::size_t options, const Shape& outputs) {
  auto& program = call.program();
  const bool counts_padding = call.flag(options);
  if (call.has(options + 1)) return program.constant(static_cast<double>(call.integer(options + 1)), outputs);
  std::vector<float> counts;
  const auto along = [&](std::size_t i, std::int64_t output) {
    const auto size = sizes[sizes.size() - 2 + i];
    const auto begin = output * pool.stride[i] - pool.padding[i];
    const auto end = std::min(begin + pool.kernel[i], size + pool.padding[i]);
    return counts_padding ? end - begin : std::min(end, size) - std::max<std::int64_t>(begin, 0);
  };
  for (std::int64_t row = 0; row < pool.outputs[0]; ++row)
    for (std::int64_t column = 0; column < pool.outputs[1]; ++column)
      counts.push_back(static_cast<float>(along(0, row) * along(1, column)));
  const auto all = program.array(counts.data(), {DType::float32, pool.outputs});
  return spread(call, program.convert(all, outputs.dtype), outputs.sizes);
}

void average_pool(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0);
  const auto pool = pool_in(call, 1, false, x.shape.sizes);
  const auto padded = padded_with(call, x, pool, 0);
  std::optional<Value> sum;
  for_each_element(pool, [&](std::int64_t row, std::int64_t column) {
    const auto one = element(call, padded, pool, row, column);
    sum = sum ? program.plus(*sum, one) : one;
  });
  call.returns({program.over(*sum, divisors(call, pool, x.shape.sizes, 5, sum->shape))});
}

void average_pool_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), x = call.value(1);
  const auto pool = pool_in(call, 2, false, x.shape.sizes);
  const auto share = program.over(gradient, divisors(call, pool, x.shape.sizes, 6, gradient.shape));
  auto sum = program.constant(0, x.shape);
  for_each_element(pool, [&](std::int64_t row, std::int64_t column) {
    sum = program.plus(sum, put_back(call, share, pool, x.shape.sizes, row, column));
  });
  call.returns({sum});
}

}  // namespace

void add_pooling(Lowerings& table) {
  table["aten::avg_pool2d"] = average_pool;
  table["aten::avg_pool2d_backward"] = average_pool_backward;
  table["aten::max_pool2d_with_indices"] = max_pool;
  table["aten::max_pool2d_with_indices_backward"] = max_pool_backward;
}

}  // namespace lockstep::tpu
