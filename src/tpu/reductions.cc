// Operators in which dimensions vanish, or are normalized.
#include <ATen/core/Reduction.h>

#include <algorithm>
#include <limits>

#include "base/text.h"
#include "ops/dtypes.h"
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Sizes all_of(const Sizes& sizes) {
  Sizes all;
  for (std::size_t d = 0; d < sizes.size(); ++d) all.push_back(static_cast<std::int64_t>(d));
  return all;
}

// The dimensions that argument i names; all where it names none.
Sizes dimensions_in(Call& call, std::size_t i, std::size_t rank) {
  Sizes dimensions;
  if (call.has(i)) {
    if (call.argument(i).isInt()) {
      dimensions = {call.integer(i)};
    } else {
      dimensions = call.integers(i);
    }
  }
  if (dimensions.empty()) return all_of(Sizes(rank));
  for (auto& dimension : dimensions) dimension = Call::dimension(dimension, rank);
  return dimensions;
}

// Where `keep` is true, as dimensions of size 1.
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

Value scaled(Call& call, const Value& x, double by) {
  return call.program().binary("stablehlo.multiply", x, call.program().constant(by, x.shape));
}

// Sums of integers are int64. dtype: the argument that may name another.
Value summand(Call& call, std::size_t dtype) {
  const auto x = call.value(0);
  if (call.has(dtype)) return call.program().convert(x, ops::dtype_of(call.dtype(dtype)));
  const bool is_floating = at::isFloatingType(ops::scalar_type_of(x.shape.dtype));
  return is_floating ? x : call.program().convert(x, DType::int64);
}

Value sum_over(Call& call, const Value& x, const Sizes& dimensions) {
  return call.program().reduce("stablehlo.add", x, 0, dimensions);
}

void sum_all(Call& call) {
  const auto x = summand(call, 1);
  call.returns({sum_over(call, x, all_of(x.shape.sizes))});
}

void sum_dimensions(Call& call) {
  const auto x = summand(call, 3);
  const auto dimensions = dimensions_in(call, 1, x.shape.sizes.size());
  call.returns({keep_dimensions(call, sum_over(call, x, dimensions), x.shape.sizes, dimensions, call.flag(2))});
}

void mean(Call& call, const Value& x, const Sizes& dimensions, bool keep) {
  const auto count = static_cast<double>(elements_of(x.shape.sizes, dimensions));
  const auto sum = sum_over(call, x, dimensions);
  const auto result = call.program().binary("stablehlo.divide", sum, call.program().constant(count, sum.shape));
  call.returns({keep_dimensions(call, result, x.shape.sizes, dimensions, keep)});
}

void mean_all(Call& call) {
  const auto x = call.value(0);
  mean(call, x, all_of(x.shape.sizes), false);
}

void mean_dimensions(Call& call) {
  const auto x = call.value(0);
  mean(call, x, dimensions_in(call, 1, x.shape.sizes.size()), call.flag(2));
}

Lowering extremum(const char* operation, double initial) {
  return [=](Call& call) {
    const auto x = call.value(0);
    const auto dimensions = dimensions_in(call, 1, x.shape.sizes.size());
    const auto result = call.program().reduce(operation, x, initial, dimensions);
    call.returns({keep_dimensions(call, result, x.shape.sizes, dimensions, call.flag(2))});
  };
}

// The largest (GT) or smallest (LT) element along a dimension and its first index.
std::pair<Value, Value> extremum_at(Call& call, const Value& x, std::int64_t dimension, const char* direction) {
  auto& program = call.program();
  const Shape index{DType::int64, {}}, scalar{x.shape.dtype, {}}, predicate{DType::boolean, {}};
  const auto indices = program.iota({DType::int64, x.shape.sizes}, dimension);
  const auto number = type_of(scalar), place = type_of(index), truth = type_of(predicate);
  const auto compare = [&](const char* name, const char* a, const char* b, const char* how, const std::string& type) {
    return text("    %", name, " = \"stablehlo.compare\"(%", a, ", %", b,
                ") {comparison_direction = #stablehlo<comparison_direction ", how, ">} : (", type, ", ", type, ") -> ",
                truth, "\n");
  };
  const auto logic = [&](const char* name, const char* operation, const char* a, const char* b) {
    return text("    %", name, " = \"stablehlo.", operation, "\"(%", a, ", %", b, ") : (", truth, ", ", truth, ") -> ",
                truth, "\n");
  };
  const auto select = [&](const char* name, const char* a, const char* b, const std::string& type) {
    return text("    %", name, " = \"stablehlo.select\"(%first, %", a, ", %", b, ") : (", truth, ", ", type, ", ", type,
                ") -> ", type, "\n");
  };
  const auto region =
      text("({\n  ^bb0(%a: ", number, ", %ai: ", place, ", %b: ", number, ", %bi: ", place, "):\n",
           compare("beyond", "a", "b", direction, number), compare("equal", "a", "b", "EQ", number),
           compare("before", "ai", "bi", "LT", place), logic("tie", "and", "equal", "before"),
           compare("nan", "a", "a", "NE", number), logic("some", "or", "beyond", "tie"),
           logic("first", "or", "some", "nan"), select("v", "a", "b", number), select("i", "ai", "bi", place),
           "    \"stablehlo.return\"(%v, %i) : (", number, ", ", place, ") -> ()\n  }) ");
  auto result = x.shape.sizes;
  result.erase(result.begin() + dimension);
  const double initial = *direction == 'G' ? -kInfinity : kInfinity;
  const auto worst = at::isFloatingType(ops::scalar_type_of(x.shape.dtype))
                         ? program.constant(initial, scalar)
                         : program.constant(*direction == 'G' ? -0x1p31 : 0x1p31 - 1, scalar);
  const auto values = program.add("stablehlo.reduce", {x, indices, worst, program.constant(0x1p62, index)},
                                  std::vector<Shape>{{x.shape.dtype, result}, {DType::int64, result}},
                                  "dimensions = " + pjrt::array_of(Sizes{dimension}), region);
  return {values[0], values[1]};
}

Lowering extremum_of_dimension(const char* direction) {
  return [direction](Call& call) {
    const auto x = call.value(0);
    const auto dimension = Call::dimension(call.integer(1), x.shape.sizes.size());
    const auto [value, index] = extremum_at(call, x, dimension, direction);
    call.returns({keep_dimensions(call, value, x.shape.sizes, {dimension}, call.flag(2)),
                  keep_dimensions(call, index, x.shape.sizes, {dimension}, call.flag(2))});
  };
}

Lowering index_of_extremum(const char* direction) {
  return [direction](Call& call) {
    auto x = call.value(0);
    auto dimension = call.has(1) ? Call::dimension(call.integer(1), x.shape.sizes.size()) : 0;
    if (!call.has(1)) x = call.program().reshape(x, {x.shape.elements()});
    const auto index = extremum_at(call, x, dimension, direction).second;
    call.returns({keep_dimensions(call, index, x.shape.sizes, {dimension}, call.flag(2) && call.has(1))});
  };
}

// x - max(x), and the sum of its exponentials, along a dimension.
struct Stable {
  Value shifted, exponentials, sum;
};
Stable stable(Call& call, const Value& x, std::int64_t dimension) {
  auto& program = call.program();
  const auto largest = program.reduce("stablehlo.maximum", x, -kInfinity, {dimension});
  const auto shifted = program.binary("stablehlo.subtract", x, spread_back(call, largest, x.shape.sizes, {dimension}));
  const auto exponentials = program.unary("stablehlo.exponential", shifted);
  return {shifted, exponentials, sum_over(call, exponentials, {dimension})};
}

void softmax(Call& call) {
  const auto x = call.value(0);
  const auto dimension = Call::dimension(call.integer(1), x.shape.sizes.size());
  const auto parts = stable(call, x, dimension);
  call.returns({call.program().binary("stablehlo.divide", parts.exponentials,
                                      spread_back(call, parts.sum, x.shape.sizes, {dimension}))});
}

void log_softmax(Call& call) {
  const auto x = call.value(0);
  const auto dimension = Call::dimension(call.integer(1), x.shape.sizes.size());
  const auto parts = stable(call, x, dimension);
  const auto logarithm = call.program().unary("stablehlo.log", parts.sum);
  call.returns({call.program().binary("stablehlo.subtract", parts.shifted,
                                      spread_back(call, logarithm, x.shape.sizes, {dimension}))});
}

// y (gradient - sum(gradient y)).
void softmax_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), y = call.value(1);
  const auto dimension = Call::dimension(call.integer(2), y.shape.sizes.size());
  const auto sum = sum_over(call, program.binary("stablehlo.multiply", gradient, y), {dimension});
  const auto difference =
      program.binary("stablehlo.subtract", gradient, spread_back(call, sum, y.shape.sizes, {dimension}));
  call.returns({program.binary("stablehlo.multiply", y, difference)});
}

// gradient - exp(y) sum(gradient).
void log_softmax_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), y = call.value(1);
  const auto dimension = Call::dimension(call.integer(2), y.shape.sizes.size());
  const auto sum = spread_back(call, sum_over(call, gradient, {dimension}), y.shape.sizes, {dimension});
  const auto share = program.binary("stablehlo.multiply", program.unary("stablehlo.exponential", y), sum);
  call.returns({program.binary("stablehlo.subtract", gradient, share)});
}

// 1 at each example's class, but where that is `ignored`; [batch, classes, ...] for targets [batch, ...].
Value one_hot(Call& call, const Value& target, const Shape& shape, std::int64_t ignored) {
  auto& program = call.program();
  const std::int64_t dimension = shape.sizes.size() == 1 ? 0 : 1;
  const Shape indices{target.shape.dtype, shape.sizes};
  const auto all = spread_back(call, target, shape.sizes, {dimension});
  const auto is_class = program.compare("EQ", all, program.iota(indices, dimension));
  const auto counts = program.compare("NE", all, program.constant(static_cast<double>(ignored), indices));
  return program.convert(program.binary("stablehlo.and", is_class, counts), shape.dtype);
}

// The classes' weights at each example's class.
Value weighted_one_hot(Call& call, const Value& target, const Shape& shape, std::size_t weight, std::int64_t ignored) {
  const auto hot = one_hot(call, target, shape, ignored);
  if (!call.has(weight)) return hot;
  const std::int64_t dimension = shape.sizes.size() == 1 ? 0 : 1;
  const auto weights = call.program().broadcast(call.value(weight), shape.sizes, {dimension});
  return call.program().binary("stablehlo.multiply", hot, weights);
}

void nll_loss(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0), target = call.value(1);
  const std::int64_t dimension = x.shape.sizes.size() == 1 ? 0 : 1;
  const auto weights = weighted_one_hot(call, target, x.shape, 2, call.integer(4));
  const auto losses = scaled(call, program.binary("stablehlo.multiply", x, weights), -1);
  const auto total = sum_over(call, weights, all_of(x.shape.sizes));
  if (call.integer(3) == at::Reduction::None) return call.returns({sum_over(call, losses, {dimension}), total});
  const auto sum = sum_over(call, losses, all_of(x.shape.sizes));
  call.returns({call.integer(3) == at::Reduction::Mean ? program.binary("stablehlo.divide", sum, total) : sum, total});
}

void nll_loss_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), x = call.value(1), target = call.value(2), total = call.value(6);
  const std::int64_t dimension = x.shape.sizes.size() == 1 ? 0 : 1;
  const auto weights = weighted_one_hot(call, target, x.shape, 3, call.integer(5));
  const auto of_loss =
      call.integer(4) == at::Reduction::Mean ? program.binary("stablehlo.divide", gradient, total) : gradient;
  const auto all = of_loss.shape.sizes.empty() ? program.broadcast(of_loss, x.shape.sizes, {})
                                               : spread_back(call, of_loss, x.shape.sizes, {dimension});
  call.returns({scaled(call, program.binary("stablehlo.multiply", weights, all), -1)});
}

}  // namespace

void add_reductions(Lowerings& table) {
  table["aten::sum"] = sum_all;
  table["aten::sum.dim_IntList"] = sum_dimensions;
  table["aten::mean"] = mean_all;
  table["aten::mean.dim"] = mean_dimensions;
  table["aten::amax"] = extremum("stablehlo.maximum", -kInfinity);
  table["aten::amin"] = extremum("stablehlo.minimum", kInfinity);
  table["aten::max.dim"] = extremum_of_dimension("GT");
  table["aten::min.dim"] = extremum_of_dimension("LT");
  table["aten::argmax"] = index_of_extremum("GT");
  table["aten::argmin"] = index_of_extremum("LT");
  table["aten::_softmax"] = softmax;
  table["aten::_log_softmax"] = log_softmax;
  table["aten::_softmax_backward_data"] = softmax_backward;
  table["aten::_log_softmax_backward_data"] = log_softmax_backward;
  for (const char* const name : {"aten::nll_loss_forward", "aten::nll_loss2d_forward"}) table[name] = nll_loss;
  for (const char* const name : {"aten::nll_loss_backward", "aten::nll_loss2d_backward"})
    table[name] = nll_loss_backward;
}

}  // namespace lockstep::tpu
