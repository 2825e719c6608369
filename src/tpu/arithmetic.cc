#include <ATen/ATen.h>

#include <limits>

#include "base/text.h"
#include "tpu/call.h"
#include "tpu/trace.h"

namespace lockstep::tpu {

// Less common arithmetic, mostly composed of pointwise.cc's.

namespace {

using TwoArguments = at::Tensor (*)(const at::Tensor&, const at::Tensor&);

// Arguments 0 and 1 in the dtype of LibTorch's promotion; the second may be a number.
std::pair<at::Tensor, at::Tensor> both(Call& call) {
  const auto x = call.tensor(0);
  if (call.argument(1).isTensor()) {
    const auto y = call.tensor(1);
    const auto as_both = at::TensorOptions(device()).dtype(at::result_type(x, y));
    return {x.to(as_both), y.to(as_both)};
  }
  const auto number = call.scalar(1);
  const auto dtype = at::result_type(x, number);
  return {x.to(dtype), at::full({}, number, x.options().dtype(dtype))};
}

Lowering of_two(TwoArguments make) {
  return [make](Call& call) {
    const auto [x, y] = both(call);
    call.returns(make(x, y));
  };
}

// The remainder with the sign of the divisor, as in Python.
at::Tensor python_remainder(const at::Tensor& x, const at::Tensor& y) {
  const auto rest = at::fmod(x, y);  // with that of the dividend
  const auto other_sign = rest.lt(0).ne(at::broadcast_tensors({y, rest})[0].lt(0)).logical_and(rest.ne(0));
  return at::where(other_sign, rest + y, rest);
}

at::Tensor truncated(const at::Tensor& x) { return x.is_floating_point() ? at::where(x < 0, x.ceil(), x.floor()) : x; }

at::Tensor floor_quotient(const at::Tensor& x, const at::Tensor& y) {
  if (!x.is_floating_point()) return (x - python_remainder(x, y)).div(y, "trunc");
  // Uses the remainder, as LibTorch does, since x / y may be rounded up to the next whole number.
  const auto quotient = (x - python_remainder(x, y)) / y;
  const auto whole = quotient.floor();
  return at::where(y.eq(0), x / y, at::where(quotient - whole > 0.5, whole + 1, whole));
}

// One operation on the elements of both, with common sizes.
void elementwise(Call& call, std::string_view operation) {
  const auto [x, y] = both(call);
  const auto sizes = at::infer_size(x.sizes(), y.sizes());
  call.returns({call.program().binary(operation, spread(call, value_of(x), sizes), spread(call, value_of(y), sizes))});
}

void divide_rounded(Call& call) {
  const auto mode = call.has(2) ? call.word(2) : "";
  const auto [x, y] = both(call);
  if (mode == "floor") return call.returns(floor_quotient(x, y));
  if (mode != "trunc") return call.returns(x / y);
  if (x.is_floating_point() || y.is_floating_point()) return call.returns(truncated(x / y));
  elementwise(call, "stablehlo.divide");
}

void clamp_by_tensors(Call& call) {
  auto x = call.tensor(0);
  if (call.has(1)) x = at::maximum(x, call.tensor(1));
  if (call.has(2)) x = at::minimum(x, call.tensor(2));
  call.returns(x);
}

// True where any, or all, elements are not 0: over the whole tensor, or along dimensions.
Lowering truth(bool any, bool has_dimensions) {
  return [=](Call& call) {
    const auto x = call.tensor(0);
    const auto truths = x.ne(0).to(at::kInt);
    const auto rank = static_cast<std::size_t>(x.dim());
    const auto dimensions = has_dimensions ? dimensions_in(call, 1, rank) : all_dimensions(rank);
    const bool keeps = has_dimensions && call.flag(2);
    if (x.dim() == 0) return call.returns(truths.ne(0));
    call.returns(any ? truths.sum(dimensions, keeps).ne(0) : truths.eq(0).sum(dimensions, keeps).eq(0));
  };
}

void product(Call& call, bool of_dimension) {
  auto& program = call.program();
  auto x = summand(call, of_dimension ? 3 : 1);
  const auto rank = x.shape.sizes.size();
  const auto dimensions =
      of_dimension ? Sizes{call.dimension(call.integer(1), std::max<std::size_t>(rank, 1))} : all_dimensions(rank);
  if (rank == 0) return call.returns({x});
  auto result = program.reduce("stablehlo.multiply", x, program.constant(1, {x.shape.dtype, {}}), dimensions);
  if (of_dimension && call.flag(2)) {
    auto sizes = x.shape.sizes;
    sizes[static_cast<std::size_t>(dimensions[0])] = 1;
    result = program.reshape(result, sizes);
  }
  call.returns({result});
}

}  // namespace

void add_arithmetic(Lowerings& table) {
  for (const char* const overload : {"", ".Tensor"}) {
    table[std::string("aten::clamp_min") + overload] = of_two(&at::maximum);
    table[std::string("aten::clamp_max") + overload] = of_two(&at::minimum);
  }
  table["aten::clamp.Tensor"] = clamp_by_tensors;
  for (const char* const overload : {".Tensor", ".Scalar"}) {
    table[std::string("aten::fmod") + overload] = [](Call& call) { elementwise(call, "stablehlo.remainder"); };
    table[std::string("aten::remainder") + overload] = of_two(&python_remainder);
  }
  for (const char* const name : {"aten::floor_divide", "aten::floor_divide.Scalar"})
    table[name] = of_two(&floor_quotient);
  for (const char* const name : {"aten::div.Tensor_mode", "aten::div.Scalar_mode"}) table[name] = divide_rounded;
  table["aten::trunc"] = [](Call& call) { call.returns(truncated(call.tensor(0))); };
  table["aten::isnan"] = [](Call& call) { call.returns(call.tensor(0).ne(call.tensor(0))); };
  table["aten::isneginf"] = [](Call& call) {
    call.returns(call.tensor(0).eq(-std::numeric_limits<double>::infinity()));
  };
  table["aten::isposinf"] = [](Call& call) {
    call.returns(call.tensor(0).eq(std::numeric_limits<double>::infinity()));
  };
  table["aten::any"] = truth(true, false);
  table["aten::all"] = truth(false, false);
  for (const char* const overload : {".dim", ".dims"}) {
    table[std::string("aten::any") + overload] = truth(true, true);
    table[std::string("aten::all") + overload] = truth(false, true);
  }
  table["aten::prod"] = [](Call& call) { product(call, false); };
  table["aten::prod.dim_int"] = [](Call& call) { product(call, true); };
}

// Products of matrices.

namespace {

// The product of arguments i and i + 1, over a dimension of each, for each index of the batch dimensions.
Value product(Call& call, std::size_t i, std::int64_t dimension, std::int64_t other, const Sizes& batch = {}) {
  call.require_equal_dtypes(i, i + 1);
  const auto a = call.value(i), b = call.value(i + 1);
  const auto of_a = a.shape.sizes[static_cast<std::size_t>(dimension)];
  const auto of_b = b.shape.sizes[static_cast<std::size_t>(other)];
  call.require(of_a == of_b, text("the sizes of its tensors differ: ", of_a, " and ", of_b));
  return call.program().dot(a, b, {dimension}, {other}, batch, batch);
}

void dot(Call& call) {
  for (const std::size_t i : {0U, 1U})
    call.require(call.tensor(i).dim() == 1, text("its tensors have ", call.tensor(i).dim(), " dimensions, and not 1"));
  call.returns({product(call, 0, 0, 0)});
}

// beta x + alpha product, x spread to the product's sizes.
void add_to(Call& call, const Value& product) {
  auto& program = call.program();
  const auto scaled = [&](const Value& value, std::size_t factor) {
    return call.real(factor) == 1 ? value : program.times(value, call.number(factor, value.shape));
  };
  if (call.real(3) == 0) return call.returns({scaled(product, 4)});  // also where x is not a number
  const auto x = call.value(0);
  const auto summand_of_x = spread(call, scaled(x, 3), product.shape.sizes);
  call.returns({program.plus(summand_of_x, scaled(product, 4))});
}

}  // namespace

void add_products(Lowerings& table) {
  for (const char* const name : {"aten::mm", "aten::mv"})
    table[name] = [](Call& call) { call.returns({product(call, 0, 1, 0)}); };
  table["aten::bmm"] = [](Call& call) { call.returns({product(call, 0, 2, 1, {0})}); };
  table["aten::dot"] = dot;
  table["aten::addmm"] = [](Call& call) { add_to(call, product(call, 1, 1, 0)); };
  table["aten::baddbmm"] = [](Call& call) { add_to(call, product(call, 1, 2, 1, {0})); };
}

}  // namespace lockstep::tpu
