// Operators in which dimensions vanish, or are normalized.
#include <ATen/core/Reduction.h>

#include <algorithm>

#include "base/text.h"
#include "ops/tensors.h"
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

// Puts reduced dimensions back with size 1 where `keep` is true.
Value keep_dimensions(Call& call, const Value& reduced, const Sizes& sizes, const Sizes& dimensions, bool keep) {
  if (!keep) return reduced;
  auto kept = sizes;
  for (const auto dimension : dimensions) kept[static_cast<std::size_t>(dimension)] = 1;
  return call.program().reshape(reduced, kept);
}

std::int64_t elements_of(const Sizes& sizes, const Sizes& dimensions) {
  std::int64_t product = 1;
  for (const auto dimension : dimensions) product *= sizes[static_cast<std::size_t>(dimension)];
  return product;
}

// The other dimensions of x's sizes again, for a value in which `dimensions` have vanished.
Value spread_back(Call& call, const Value& reduced, const Sizes& sizes, const Sizes& dimensions) {
  Sizes others;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(sizes.size()); ++i)
    if (std::find(dimensions.begin(), dimensions.end(), i) == dimensions.end()) others.push_back(i);
  return call.program().broadcast(reduced, sizes, others);
}

bool is_of_16_bits(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// 16-bit numbers in float32.
Value precise(Call& call, const Value& x) {
  return is_of_16_bits(x.shape.dtype) ? call.program().convert(x, DType::float32) : x;
}

// x with the dtype that the argument in place `dtype` names.
Value with_dtype(Call& call, std::size_t dtype) {
  const auto x = call.value(0);
  return call.program().convert(x, call.dtype(dtype, x.shape.dtype));
}

// `place`: of the dimensions, after which come `keep` and the dtype; without it all dimensions are summed.
void sum(Call& call, std::optional<std::size_t> place) {
  const auto x = summand(call, place ? *place + 2 : 1);
  const auto rank = x.shape.sizes.size();
  const auto dimensions = place ? dimensions_in(call, *place, rank) : all_dimensions(rank);
  const auto sums = sum_over(call, x, dimensions);
  call.returns({keep_dimensions(call, sums, x.shape.sizes, dimensions, place && call.flag(*place + 1))});
}

void mean(Call& call, std::optional<std::size_t> place) {
  const auto x = with_dtype(call, place ? *place + 2 : 1);
  if (!pjrt::is_floating(x.shape.dtype)) call.refuse("means are of floating-point numbers");
  const auto rank = x.shape.sizes.size();
  const auto dimensions = place ? dimensions_in(call, *place, rank) : all_dimensions(rank);
  const auto sum = sum_over(call, precise(call, x), dimensions);
  const auto count = static_cast<double>(elements_of(x.shape.sizes, dimensions));
  const auto result = call.program().over(sum, call.program().constant(count, sum.shape));
  call.returns({keep_dimensions(call, call.program().convert(result, x.shape.dtype), x.shape.sizes, dimensions,
                                place && call.flag(*place + 1))});
}

// Reduces from the value that `begin` gives for x's dtype.
using Begin = Value (pjrt::ProgramText::*)(const Shape&);
Lowering extremum(const char* operation, Begin begin) {
  return [=](Call& call) {
    const auto x = call.value(0);
    const auto dimensions = dimensions_in(call, 1, x.shape.sizes.size());
    const auto initial = (call.program().*begin)({x.shape.dtype, {}});
    const auto result = call.program().reduce(operation, x, initial, dimensions);
    call.returns({keep_dimensions(call, result, x.shape.sizes, dimensions, call.flag(2))});
  };
}

// The largest (GT) or smallest (LT) element along a dimension and its first index.
std::pair<Value, Value> extremum_at(Call& call, const Value& x, std::int64_t dimension, const char* direction) {
  auto& program = call.program();
  const Shape index{DType::int64, {}}, scalar{x.shape.dtype, {}};
  const auto indices = program.iota({DType::int64, x.shape.sizes}, dimension);
  const auto better = [&](pjrt::ProgramText& inside, const std::vector<Value>& arguments) {
    const auto &a = arguments[0], &at_a = arguments[1], &b = arguments[2], &at_b = arguments[3];
    const auto either = [&](const Value& one, const Value& other) { return inside.binary("stablehlo.or", one, other); };
    const auto tie = inside.binary("stablehlo.and", inside.compare("EQ", a, b), inside.compare("LT", at_a, at_b));
    const auto first = either(either(inside.compare(direction, a, b), tie), inside.compare("NE", a, a));
    return std::vector<Value>{inside.select(first, a, b), inside.select(first, at_a, at_b)};
  };
  auto result = x.shape.sizes;
  result.erase(result.begin() + dimension);
  const auto worst = *direction == 'G' ? program.lowest(scalar) : program.highest(scalar);
  const auto values = program.add("stablehlo.reduce", {x, indices, worst, program.highest(index)},
                                  std::vector<Shape>{{x.shape.dtype, result}, {DType::int64, result}},
                                  "dimensions = " + pjrt::array_of(Sizes{dimension}),
                                  pjrt::ProgramText::region({scalar, index, scalar, index}, better));
  return {values[0], values[1]};
}

Lowering extremum_of_dimension(const char* direction) {
  return [direction](Call& call) {
    const auto x = call.value(0);
    const auto dimension = call.dimension(call.integer(1), x.shape.sizes.size());
    const auto [value, index] = extremum_at(call, x, dimension, direction);
    call.returns({keep_dimensions(call, value, x.shape.sizes, {dimension}, call.flag(2)),
                  keep_dimensions(call, index, x.shape.sizes, {dimension}, call.flag(2))});
  };
}

Lowering index_of_extremum(const char* direction) {
  return [direction](Call& call) {
    auto x = call.value(0);
    auto dimension = call.has(1) ? call.dimension(call.integer(1), x.shape.sizes.size()) : 0;
    if (!call.has(1)) x = call.program().reshape(x, {x.shape.elements()});
    const auto rank = call.value(0).shape.sizes.size();
    const auto index = extremum_at(call, x, dimension, direction).second;
    if (!call.has(1)) return call.returns({call.flag(2) ? call.program().reshape(index, Sizes(rank, 1)) : index});
    call.returns({keep_dimensions(call, index, x.shape.sizes, {dimension}, call.flag(2))});
  };
}

// The softmax along a dimension, or its logarithm. Place 2 says whether 16-bit numbers give float32.
Lowering softmax(bool logarithm) {
  return [logarithm](Call& call) {
    auto& program = call.program();
    const auto given = call.value(0);
    call.require(pjrt::is_floating(given.shape.dtype),
                 text("the input's dtype is ", name_of(given.shape.dtype), "; it must be a floating point type"));
    const auto x = precise(call, given);
    const auto& sizes = x.shape.sizes;
    const Sizes along{call.dimension(call.integer(1), sizes.size())};
    const auto largest = program.reduce("stablehlo.maximum", x, program.lowest({x.shape.dtype, {}}), along);
    const auto shifted = program.minus(x, spread_back(call, largest, sizes, along));
    const auto exponentials = program.unary("stablehlo.exponential", shifted);
    const auto sum = sum_over(call, exponentials, along);
    const auto result =
        logarithm ? program.minus(shifted, spread_back(call, program.unary("stablehlo.log", sum), sizes, along))
                  : program.over(exponentials, spread_back(call, sum, sizes, along));
    call.returns({program.convert(result, call.flag(2) ? DType::float32 : given.shape.dtype)});
  };
}

// y (gradient - sum(gradient y)); for the logarithm gradient - exp(y) sum(gradient). Place 3 has the dtype of x.
Lowering softmax_backward(bool logarithm) {
  return [logarithm](Call& call) {
    auto& program = call.program();
    const auto gradient = precise(call, call.value(0)), y = precise(call, call.value(1));
    const Sizes along{call.dimension(call.integer(2), y.shape.sizes.size())};
    const auto total = sum_over(call, logarithm ? gradient : program.times(gradient, y), along);
    const auto sum = spread_back(call, total, y.shape.sizes, along);
    const auto result = logarithm
                            ? program.minus(gradient, program.times(program.unary("stablehlo.exponential", y), sum))
                            : program.times(y, program.minus(gradient, sum));
    call.returns({program.convert(result, ops::dtype_of(call.dtype(3)))});
  };
}

// The class dimension of scores of this shape: [batch, classes, ...], or [classes].
std::int64_t classes_of(const Shape& shape) { return shape.sizes.size() == 1 ? 0 : 1; }

// Where each example's class is, but where that is `ignored`; for targets [batch, ...].
Value at_class(Call& call, const Value& target, const Shape& shape, std::int64_t ignored) {
  auto& program = call.program();
  const Shape indices{target.shape.dtype, shape.sizes};
  const auto all = spread_back(call, target, shape.sizes, {classes_of(shape)});
  const auto is_class = program.compare("EQ", all, program.iota(indices, classes_of(shape)));
  const auto counts = program.compare("NE", all, program.integer(ignored, indices));
  return program.binary("stablehlo.and", is_class, counts);
}

// Returns `values` where the condition holds, else 0, whatever the other values are.
Value only_where(Call& call, const Value& condition, const Value& values) {
  return call.program().select(condition, values, call.program().constant(0, values.shape));
}

// The weight of each class, or 1.
Value class_weights(Call& call, const Shape& shape, std::size_t place) {
  return call.has(place) ? call.program().broadcast(call.value(place), shape.sizes, {classes_of(shape)})
                         : call.program().constant(1, shape);
}

void nll_loss(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0);
  const auto labels = call.tensor(1).scalar_type();
  call.require(labels == at::kLong || labels == at::kByte, text("the target's dtype is ", labels, "; it must be Long"));
  auto sizes = x.shape.sizes;
  sizes.erase(sizes.begin() + classes_of(x.shape));
  call.require(call.tensor(1).sizes() == sizes,
               text("the target's sizes are ", call.tensor(1).sizes(), "; with an input of ", call.tensor(0).sizes(),
                    " they must be ", at::IntArrayRef(sizes)));
  const auto classes = call.tensor(0).size(classes_of(x.shape));
  call.require(!call.has(2) || call.tensor(2).numel() == classes,
               text("its weights must be one for each of the ", classes, " classes"));
  const auto is_target = at_class(call, call.value(1), x.shape, call.integer(4));
  const auto weights = class_weights(call, x.shape, 2);
  const auto losses = only_where(call, is_target, program.times(program.times(x, weights), -1));
  const auto total = sum_over(call, only_where(call, is_target, weights), all_dimensions(x.shape.sizes.size()));
  if (call.integer(3) == at::Reduction::None)
    return call.returns({sum_over(call, losses, {classes_of(x.shape)}), total});
  const auto sum = sum_over(call, losses, all_dimensions(x.shape.sizes.size()));
  call.returns({call.integer(3) == at::Reduction::Mean ? program.over(sum, total) : sum, total});
}

void nll_loss_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), x = call.value(1), total = call.value(6);
  const auto is_target = at_class(call, call.value(2), x.shape, call.integer(5));
  const auto of_loss = call.integer(4) == at::Reduction::Mean ? program.over(gradient, total) : gradient;
  const auto all = of_loss.shape.sizes.empty() ? program.broadcast(of_loss, x.shape.sizes, {})
                                               : spread_back(call, of_loss, x.shape.sizes, {classes_of(x.shape)});
  const auto shares = program.times(class_weights(call, x.shape, 3), all);
  call.returns({only_where(call, is_target, program.times(shares, -1))});
}

}  // namespace

Sizes dimensions_in(Call& call, std::size_t i, std::size_t rank) {
  Sizes dimensions;
  if (call.has(i)) dimensions = call.argument(i).isInt() ? Sizes{call.integer(i)} : call.integers(i);
  if (dimensions.empty() || rank == 0) return all_dimensions(rank);
  for (auto& dimension : dimensions) dimension = call.dimension(dimension, rank);
  return dimensions;
}

Value summand(Call& call, std::size_t dtype) {
  const auto x = with_dtype(call, dtype);
  return pjrt::is_floating(x.shape.dtype) || call.has(dtype) ? x : call.program().convert(x, DType::int64);
}

Value sum_over(Call& call, const Value& x, const Sizes& dimensions) {
  const auto summands = precise(call, x);
  const auto sum = call.program().reduce("stablehlo.add", summands,
                                         call.program().constant(0, {summands.shape.dtype, {}}), dimensions);
  return call.program().convert(sum, x.shape.dtype);
}

void add_reductions(Lowerings& table) {
  table["aten::sum"] = [](Call& call) { sum(call, std::nullopt); };
  table["aten::sum.dim_IntList"] = [](Call& call) { sum(call, 1); };
  table["aten::mean"] = [](Call& call) { mean(call, std::nullopt); };
  table["aten::mean.dim"] = [](Call& call) { mean(call, 1); };
  table["aten::amax"] = extremum("stablehlo.maximum", &pjrt::ProgramText::lowest);
  table["aten::amin"] = extremum("stablehlo.minimum", &pjrt::ProgramText::highest);
  table["aten::max.dim"] = extremum_of_dimension("GT");
  table["aten::min.dim"] = extremum_of_dimension("LT");
  table["aten::argmax"] = index_of_extremum("GT");
  table["aten::argmin"] = index_of_extremum("LT");
  table["aten::_softmax"] = softmax(false);
  table["aten::_log_softmax"] = softmax(true);
  table["aten::_softmax_backward_data"] = softmax_backward(false);
  table["aten::_log_softmax_backward_data"] = softmax_backward(true);
  for (const char* const name : {"aten::nll_loss_forward", "aten::nll_loss2d_forward"}) table[name] = nll_loss;
  for (const char* const name : {"aten::nll_loss_backward", "aten::nll_loss2d_backward"})
    table[name] = nll_loss_backward;
}

}  // namespace lockstep::tpu
