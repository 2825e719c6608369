// Operators that move elements, and that make tensors.
#include <ATen/native/TypeProperties.h>

#include <algorithm>

#include "ops/tensors.h"
#include "tpu/call.h"
#include "tpu/trace.h"

namespace lockstep::tpu {
namespace {

// Sizes of which one may be -1.
void view(Call& call) {
  const auto x = call.value(0);
  auto sizes = call.integers(1);
  std::int64_t known = 1;
  for (const auto size : sizes)
    if (size >= 0) known *= size;
  for (auto& size : sizes)
    if (size < 0) size = known == 0 ? 0 : x.shape.elements() / known;
  call.returns({call.program().reshape(x, sizes)});
}

void same(Call& call) { call.returns({call.value(0)}); }

void transpose_two(Call& call) {
  const auto x = call.value(0);
  const auto rank = x.shape.sizes.size();
  auto permutation = all_dimensions(rank);
  const bool is_t = call.name().starts_with("aten::t_") || call.name() == "aten::t";
  if (rank > 1)
    std::swap(permutation[static_cast<std::size_t>(is_t ? 0 : call.dimension(call.integer(1), rank))],
              permutation[static_cast<std::size_t>(is_t ? 1 : call.dimension(call.integer(2), rank))]);
  call.returns({call.program().transpose(x, permutation)});
}

void permute(Call& call) {
  const auto x = call.value(0);
  auto permutation = call.integers(1);
  for (auto& dimension : permutation) dimension = call.dimension(dimension, x.shape.sizes.size());
  call.returns({call.program().transpose(x, permutation)});
}

// New dimensions come first; -1 keeps a size.
void expand(Call& call) {
  const auto x = call.value(0);
  auto sizes = call.integers(1);
  const auto added = sizes.size() - x.shape.sizes.size();
  Sizes dimensions;
  for (std::size_t i = 0; i < x.shape.sizes.size(); ++i) {
    if (sizes[added + i] < 0) sizes[added + i] = x.shape.sizes[i];
    dimensions.push_back(static_cast<std::int64_t>(added + i));
  }
  call.returns({call.program().broadcast(x, sizes, dimensions)});
}

// A stretch of one dimension.
struct Stretch {
  std::int64_t dimension, begin, end, step;
};

Value cut(Call& call, const Value& x, const Stretch& of) {
  Sizes begin(x.shape.sizes.size()), end = x.shape.sizes, step(begin.size(), 1);
  const auto d = static_cast<std::size_t>(of.dimension);
  begin[d] = of.begin;
  end[d] = of.end;
  step[d] = of.step;
  return call.program().slice(x, begin, end, step);
}

// The arguments from place `i` on: dimension, begin, end, step.
Stretch stretch_in(Call& call, std::size_t i, const Sizes& sizes) {
  Stretch of{call.dimension(call.integer(i), sizes.size()), 0, 0, call.integer(i + 3)};
  const auto size = sizes[static_cast<std::size_t>(of.dimension)];
  const auto within = [&](std::int64_t at) { return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size); };
  of.begin = call.has(i + 1) ? within(call.integer(i + 1)) : 0;
  of.end = std::max(of.begin, call.has(i + 2) ? within(call.integer(i + 2)) : size);
  return of;
}

void slice(Call& call) {
  const auto x = call.value(0);
  call.returns({cut(call, x, stretch_in(call, 1, x.shape.sizes))});
}

Stretch one_in(Call& call, std::size_t i, const Sizes& sizes) {
  const auto dimension = call.dimension(call.integer(i), sizes.size());
  auto at = call.integer(i + 1);
  if (at < 0) at += sizes[static_cast<std::size_t>(dimension)];
  return {dimension, at, at + 1, 1};
}

void select(Call& call) {
  const auto x = call.value(0);
  const auto of = one_in(call, 1, x.shape.sizes);
  auto sizes = x.shape.sizes;
  sizes.erase(sizes.begin() + of.dimension);
  call.returns({call.program().reshape(cut(call, x, of), sizes)});
}

// x with `part` in a stretch of it; elsewhere x as it was. `part` is spread to x's sizes by zeros around it.
Value replaced(Call& call, const Value& x, const Value& part, const Stretch& of) {
  auto& program = call.program();
  const auto rank = x.shape.sizes.size(), d = static_cast<std::size_t>(of.dimension);
  const auto count = part.shape.sizes[d];
  if (count == 0) return x;
  Sizes low(rank), high(rank), between(rank);
  low[d] = of.begin;
  between[d] = of.step - 1;
  high[d] = x.shape.sizes[d] - (of.begin + (count - 1) * of.step + 1);
  const auto ones = program.constant(1, {DType::boolean, part.shape.sizes});
  return program.select(program.pad(ones, 0, low, high, between), program.pad(part, 0, low, high, between), x);
}

// Puts argument 1 into a stretch of x, or into one place of a dimension; for a backward, the gradient into zeros of the
// sizes that argument 1 names.
Lowering put(bool into_one, bool backward) {
  return [=](Call& call) {
    auto& program = call.program();
    const auto given = call.value(0);
    const auto x = backward ? program.constant(0, {given.shape.dtype, call.integers(1)}) : given;
    const auto part = backward ? given : program.convert(call.value(1), x.shape.dtype);
    auto sizes = x.shape.sizes;
    if (!into_one) return call.returns({replaced(call, x, part, stretch_in(call, 2, sizes))});
    const auto of = one_in(call, 2, sizes);
    sizes[static_cast<std::size_t>(of.dimension)] = 1;
    call.returns({replaced(call, x, program.reshape(part, sizes), of)});
  };
}

void cat(Call& call) {
  const auto all = call.values(0);
  const auto dtype = ops::dtype_of(at::native::result_type(call.argument(0).toTensorVector()));
  std::vector<Value> parts;
  for (const auto& part : all)  // LibTorch skips empty ones of one dimension
    if (part.shape.sizes != Sizes{0}) parts.push_back(call.program().convert(part, dtype));
  if (parts.empty()) return call.returns({call.program().convert(all.at(0), dtype)});
  call.returns({call.program().concatenate(parts, call.dimension(call.integer(1), parts[0].shape.sizes.size()))});
}

void unsqueeze(Call& call) {
  const auto x = call.value(0);
  auto sizes = x.shape.sizes;
  sizes.insert(sizes.begin() + call.dimension(call.integer(1), sizes.size() + 1), 1);
  call.returns({call.program().reshape(x, sizes)});
}

// All dimensions of size 1, or those of them that are named.
void squeeze(Call& call) {
  const auto x = call.value(0);
  Sizes named, sizes;
  const bool all = call.name().find('.') == std::string::npos;
  if (!all) named = call.argument(1).isInt() ? Sizes{call.integer(1)} : call.integers(1);
  for (auto& dimension : named) dimension = call.dimension(dimension, x.shape.sizes.size());
  for (std::size_t i = 0; i < x.shape.sizes.size(); ++i) {
    const bool is_named = all || std::find(named.begin(), named.end(), static_cast<std::int64_t>(i)) != named.end();
    if (x.shape.sizes[i] != 1 || !is_named) sizes.push_back(x.shape.sizes[i]);
  }
  call.returns({call.program().reshape(x, sizes)});
}

// Converts to another dtype. LibTorch leaves it to this operator to give a tensor that programs may change in place.
void to_copy(Call& call) {
  if (call.has(3) && call.argument(3).toDevice().type() != device().type())
    call.refuse("what is computed while a step is traced has no value yet; make it an output of the program");
  const auto x = call.array(0);
  call.returns_wrapped(call.program().convert(x, call.dtype(1, x.shape.dtype)));
}

// Returns the tensor that is copied into `x`, with x's dtype and sizes.
void copy(Call& call) {
  const auto x = call.value(0);
  const auto from = call.program().convert(call.array(1), x.shape.dtype);
  call.returns({spread(call, from, x.shape.sizes)});
}

// New tensors of one number, of the sizes in place 0, of those of x, or of those in place 1 beside x. The argument in
// place `dtype` may name the dtype.
Lowering filled(double with, std::size_t dtype) {
  return [=](Call& call) {
    call.returns({call.program().constant(with, {call.dtype(dtype, default_dtype()), call.integers(0)})});
  };
}

Lowering filled_like(double with) {
  return [with](Call& call) {
    const auto [of_x, sizes] = call.value(0).shape;
    call.returns({call.program().constant(with, {call.dtype(1, of_x), sizes})});
  };
}

Lowering filled_as(double with, std::size_t dtype) {
  return [=](Call& call) {
    const auto type = call.has(dtype) ? ops::dtype_of(call.dtype(dtype)) : call.value(0).shape.dtype;
    call.returns({call.program().constant(with, {type, call.integers(1)})});
  };
}

void full(Call& call) {
  const auto number = call.scalar(1);
  const auto natural = number.isBoolean() ? DType::boolean : number.isIntegral(false) ? DType::int64 : default_dtype();
  call.returns({call.number(1, {call.dtype(2, natural), call.integers(0)})});
}

void full_like(Call& call) {
  const auto [of_x, sizes] = call.value(0).shape;
  call.returns({call.number(1, {call.dtype(2, of_x), sizes})});
}

void new_full(Call& call) {
  const auto type = call.has(3) ? ops::dtype_of(call.dtype(3)) : call.value(0).shape.dtype;
  call.returns({call.number(2, {type, call.integers(1)})});
}

void scalar(Call& call) { call.returns({call.number(0, {call.dtype(1, default_dtype()), {}})}); }
void fill(Call& call) { call.returns({call.number(1, call.value(0).shape)}); }
void zero(Call& call) { call.returns({call.program().constant(0, call.value(0).shape)}); }

// A view has two names: what LibTorch's functionalization calls, and what composed operators call inside it.
void add_view(Lowerings& table, const std::string& name, const std::string& overload, const Lowering& lowering) {
  table["aten::" + name + overload] = lowering;
  table["aten::" + name + "_copy" + overload] = lowering;
}

}  // namespace

void add_shapes(Lowerings& table) {
  for (const char* const name : {"view", "_reshape_alias"}) add_view(table, name, "", view);
  table["aten::_unsafe_view"] = view;
  for (const char* const name : {"detach", "alias", "lift_fresh"}) add_view(table, name, "", same);
  table["aten::clone"] = same;
  add_view(table, "t", "", transpose_two);
  add_view(table, "transpose", ".int", transpose_two);
  add_view(table, "permute", "", permute);
  add_view(table, "expand", "", expand);
  add_view(table, "slice", ".Tensor", slice);
  add_view(table, "select", ".int", select);
  add_view(table, "unsqueeze", "", unsqueeze);
  for (const char* const overload : {"", ".dim", ".dims"}) add_view(table, "squeeze", overload, squeeze);
  table["aten::slice_scatter"] = put(/*into_one=*/false, /*backward=*/false);
  table["aten::select_scatter"] = put(/*into_one=*/true, /*backward=*/false);
  table["aten::slice_backward"] = put(/*into_one=*/false, /*backward=*/true);
  table["aten::select_backward"] = put(/*into_one=*/true, /*backward=*/true);
  table["aten::cat"] = cat;
  table["aten::_to_copy"] = to_copy;
  table["aten::copy"] = copy;
  table["aten::zeros"] = filled(0, 1);
  table["aten::ones"] = filled(1, 1);
  table["aten::_efficientzerotensor"] = filled(0, 1);
  table["aten::empty.memory_format"] = filled(0, 1);
  table["aten::empty_strided"] = filled(0, 2);
  for (const char* const name : {"aten::zeros_like", "aten::empty_like"}) table[name] = filled_like(0);
  table["aten::ones_like"] = filled_like(1);
  for (const char* const name : {"aten::new_zeros", "aten::new_empty"}) table[name] = filled_as(0, 2);
  table["aten::new_empty_strided"] = filled_as(0, 3);
  table["aten::new_ones"] = filled_as(1, 2);
  table["aten::new_full"] = new_full;
  table["aten::full"] = full;
  table["aten::scalar_tensor"] = scalar;
  table["aten::full_like"] = full_like;
  table["aten::fill.Scalar"] = fill;
  table["aten::zero"] = zero;
}

}  // namespace lockstep::tpu
