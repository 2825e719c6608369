// Sorting, sums along a dimension, and sequences of numbers.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

// True where the first of two elements of `dtype` comes before the second. NaN is the largest number, as in LibTorch.
std::string comparison(DType dtype, bool descending) {
  const Shape scalar{dtype, {}}, index{DType::int64, {}};
  const auto compare = [&](pjrt::ProgramText& inside, const std::vector<Value>& arguments) {
    const auto &first = arguments[descending ? 1 : 0], &second = arguments[descending ? 0 : 1];
    const auto less = inside.compare("LT", first, second);
    if (!pjrt::is_floating(dtype)) return std::vector<Value>{less};
    const auto second_is_nan = inside.compare("NE", second, second),
               first_is_number = inside.compare("EQ", first, first);
    const auto only_second = inside.binary("stablehlo.and", second_is_nan, first_is_number);
    return std::vector<Value>{inside.binary("stablehlo.or", less, only_second)};
  };
  return pjrt::ProgramText::region({scalar, scalar, index, index}, compare);
}

// The elements in order along a dimension, and where they were. Equal ones stay in their order.
std::vector<Value> sorted(Call& call, const Value& x, std::int64_t dimension, bool descending) {
  if (x.shape.sizes.empty()) return {x, call.program().constant(0, {DType::int64, {}})};
  const Shape places{DType::int64, x.shape.sizes};
  return call.program().add(
      "stablehlo.sort", {x, call.program().iota(places, dimension)}, std::vector<Shape>{x.shape, places},
      text("dimension = ", dimension, " : i64, is_stable = true"), comparison(x.shape.dtype, descending));
}

std::int64_t dimension_of(Call& call, std::size_t i, const Value& x) {
  return x.shape.sizes.empty() ? 0 : call.dimension(call.integer(i), x.shape.sizes.size());
}

void sort(Call& call, std::size_t first) {
  const auto x = call.value(0);
  call.returns(sorted(call, x, dimension_of(call, first, x), call.flag(first + 1)));
}

void top_k(Call& call) {
  const auto x = call.value(0);
  const auto dimension = dimension_of(call, 2, x);
  auto results = sorted(call, x, dimension, call.flag(3));
  if (!x.shape.sizes.empty()) {
    const auto rank = x.shape.sizes.size();
    auto end = x.shape.sizes;
    end[static_cast<std::size_t>(dimension)] = call.integer(1);
    for (auto& result : results) result = call.program().slice(result, Sizes(rank), end, Sizes(rank, 1));
  }
  call.returns(results);
}

// Takes a step for each power of two below the size: each adds the elements 1, 2, 4, ... places before.
void cumulate(Call& call, std::string_view operation, double neutral) {
  auto& program = call.program();
  auto x = summand(call, 2);
  const auto rank = x.shape.sizes.size();
  if (rank == 0) return call.returns({x});
  const auto dimension = static_cast<std::size_t>(dimension_of(call, 1, x));
  for (std::int64_t by = 1; by < x.shape.sizes[dimension]; by *= 2) {
    Sizes low(rank), high(rank);
    low[dimension] = by;
    high[dimension] = -by;
    x = program.binary(operation, x, program.pad(x, neutral, low, high, Sizes(rank)));
  }
  call.returns({x});
}

// begin, begin + step, ...
void arithmetic_sequence(Call& call, double begin, double step, const Shape& shape) {
  auto& program = call.program();
  const bool is_whole = !pjrt::is_floating(shape.dtype) && step == std::floor(step);
  const Shape exact{is_whole ? DType::int64 : DType::float32, shape.sizes};
  const Shape wide{shape.dtype == DType::float64 ? DType::float64 : exact.dtype, shape.sizes};
  const auto scaled = program.times(program.iota(wide, 0), program.constant(step, wide));
  call.returns({program.convert(program.plus(scaled, program.constant(begin, wide)), shape.dtype)});
}

void range(Call& call) {
  const auto begin = call.scalar(0), end = call.scalar(1), step = call.scalar(2);
  const bool whole = begin.isIntegral(false) && end.isIntegral(false) && step.isIntegral(false);
  const auto dtype = call.dtype(3, whole ? DType::int64 : DType::float32);
  const double count = std::ceil((end.toDouble() - begin.toDouble()) / step.toDouble());
  arithmetic_sequence(call, begin.toDouble(), step.toDouble(), {dtype, {static_cast<std::int64_t>(count)}});
}

void linear_sequence(Call& call) {
  const double begin = call.real(0), end = call.real(1);
  const auto count = call.integer(2);
  arithmetic_sequence(call, begin, count > 1 ? (end - begin) / static_cast<double>(count - 1) : 0,
                      {call.dtype(3, DType::float32), {count}});
}

// True where an element's column is at most (at least) the number of its row plus the diagonal's.
Value on_side(Call& call, const Sizes& sizes, std::int64_t diagonal, bool lower) {
  auto& program = call.program();
  const Shape places{DType::int64, sizes};
  const auto rank = static_cast<std::int64_t>(sizes.size());
  const auto row = program.plus(program.iota(places, rank - 2), program.integer(diagonal, places));
  return program.compare(lower ? "LE" : "GE", program.iota(places, rank - 1), row);
}

void triangle(Call& call, bool lower) {
  const auto x = call.value(0);
  const auto side = on_side(call, x.shape.sizes, call.integer(1), lower);
  call.returns({call.program().select(side, x, call.program().constant(0, x.shape))});
}

void identity(Call& call, const Sizes& sizes, std::size_t dtype) {
  auto& program = call.program();
  const Shape places{DType::int64, sizes};
  const auto diagonal = program.compare("EQ", program.iota(places, 0), program.iota(places, 1));
  call.returns({program.convert(diagonal, call.dtype(dtype, DType::float32))});
}

void flip(Call& call) {
  const auto x = call.value(0);
  Sizes dimensions;
  for (const auto i : call.integers(1)) {
    dimensions.push_back(call.dimension(i, x.shape.sizes.size()));
    call.require(std::count(dimensions.begin(), dimensions.end(), dimensions.back()) == 1,
                 text("it has the dimension ", i, " twice"));
  }
  call.returns({call.program().add("stablehlo.reverse", {x}, x.shape, "dimensions = " + pjrt::array_of(dimensions))});
}

void pad(Call& call) {
  const auto x = call.value(0);
  const auto rank = x.shape.sizes.size();
  const auto by = call.integers(1);  // [before, after] in the last dimension, then in the one before, ...
  Sizes low(rank), high(rank);
  for (std::size_t i = 0; i + 1 < by.size(); i += 2) {
    low[rank - 1 - i / 2] = by[i];
    high[rank - 1 - i / 2] = by[i + 1];
  }
  call.returns({call.program().pad(x, call.real(2), low, high, Sizes(rank))});
}

}  // namespace

void add_ordering(Lowerings& table) {
  table["aten::sort"] = [](Call& call) { sort(call, 1); };
  table["aten::sort.stable"] = [](Call& call) { sort(call, 2); };
  table["aten::topk"] = top_k;
  table["aten::cumsum"] = [](Call& call) { cumulate(call, "stablehlo.add", 0); };
  table["aten::cumprod"] = [](Call& call) { cumulate(call, "stablehlo.multiply", 1); };
  table["aten::arange.start_step"] = range;
  table["aten::linspace"] = linear_sequence;
  table["aten::tril"] = [](Call& call) { triangle(call, true); };
  table["aten::triu"] = [](Call& call) { triangle(call, false); };
  table["aten::eye"] = [](Call& call) { identity(call, {call.integer(0), call.integer(0)}, 1); };
  table["aten::eye.m"] = [](Call& call) { identity(call, {call.integer(0), call.integer(1)}, 2); };
  table["aten::flip"] = flip;
  table["aten::constant_pad_nd"] = pad;
}

}  // namespace lockstep::tpu
