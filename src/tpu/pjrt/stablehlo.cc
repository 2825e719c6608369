#include "tpu/pjrt/stablehlo.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "base/text.h"
#include "kernels/half.h"

namespace lockstep::pjrt {
namespace {

constexpr std::array<const char*, kDTypes> kElementTypes{"f32", "f64", "f16", "bf16", "i32",
                                                         "i64", "ui8", "i8",  "i16",  "i1"};

const char* element_type(DType dtype) { return kElementTypes[static_cast<std::size_t>(dtype)]; }

std::string hexadecimal(const unsigned char* bytes, std::size_t count, bool most_significant_first) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string digits = "0x";
  for (std::size_t i = 0; i < count; ++i) {
    const auto byte = bytes[most_significant_first ? count - 1 - i : i];
    digits += kDigits[byte >> 4];
    digits += kDigits[byte & 15];
  }
  return digits;
}

template <class Number>
std::string bits_of(Number number) {
  const auto bytes = std::bit_cast<std::array<unsigned char, sizeof(Number)>>(number);
  return hexadecimal(bytes.data(), bytes.size(), true);
}

// Floating-point numbers as their bits, so that all of them, also infinity, are exact.
std::string literal(double number, DType dtype) {
  switch (dtype) {
    case DType::float32: return bits_of(static_cast<float>(number));
    case DType::float64: return bits_of(number);
    case DType::float16: return bits_of(kernels::Float16(static_cast<float>(number)).bits);
    case DType::bfloat16: return bits_of(kernels::BFloat16(static_cast<float>(number)).bits);
    case DType::boolean: return number != 0 ? "true" : "false";
    default: return std::to_string(std::llround(number));
  }
}

}  // namespace

std::vector<std::int64_t> permuted(const std::vector<std::int64_t>& values,
                                   const std::vector<std::int64_t>& permutation) {
  std::vector<std::int64_t> result;
  for (const auto from : permutation) result.push_back(values[static_cast<std::size_t>(from)]);
  return result;
}

std::vector<std::int64_t> inverse(const std::vector<std::int64_t>& permutation) {
  std::vector<std::int64_t> result(permutation.size());
  for (std::size_t i = 0; i < permutation.size(); ++i)
    result[static_cast<std::size_t>(permutation[i])] = static_cast<std::int64_t>(i);
  return result;
}

namespace {

bool contains(const std::vector<std::int64_t>& dimensions, std::size_t i) {
  return std::find(dimensions.begin(), dimensions.end(), static_cast<std::int64_t>(i)) != dimensions.end();
}

std::int64_t place_of(std::int64_t dimension, const std::vector<std::int64_t>& all) {
  return std::find(all.begin(), all.end(), dimension) - all.begin();
}

}  // namespace

bool is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 || dtype == DType::bfloat16;
}

std::string type_of(const Shape& shape) {
  std::string type = "tensor<";
  for (const auto size : shape.sizes) type += text(size, "x");
  return text(type, element_type(shape.dtype), ">");
}

std::string types_of(const std::vector<Value>& values) {
  std::vector<std::string> types;
  for (const auto& value : values) types.push_back(type_of(value.shape));
  return join(types);
}

std::string names_of(const std::vector<Value>& values) {
  std::vector<std::string> names;
  for (const auto& value : values) names.push_back(value.name);
  return join(names);
}

std::string array_of(std::span<const std::int64_t> numbers) {
  return numbers.empty() ? "array<i64>" : text("array<i64: ", join(numbers), ">");
}

std::string numbers_of(std::span<const std::int64_t> numbers) { return text("[", join(numbers), "]"); }

std::string reducer(std::string_view operation, DType dtype) {
  const Shape scalar{dtype, {}};
  return ProgramText::region({scalar, scalar}, [&](ProgramText& inside, const std::vector<Value>& both) {
    return std::vector<Value>{inside.binary(operation, both[0], both[1])};
  });
}

std::string ProgramText::region(const std::vector<Shape>& arguments, const Body& body) {
  ProgramText inside;
  inside.prefix_ = "%inside";  // names of the operation's own program are not given again
  std::vector<std::string> block;
  for (const auto& shape : arguments) block.push_back(text(inside.argument(shape).name, ": ", type_of(shape)));
  const auto results = body(inside, inside.arguments_);
  inside.write_used(results);
  return text("{\n  ^bb0(", join(block), "):\n", inside.lines_, "    \"stablehlo.return\"(", names_of(results), ") : (",
              types_of(results), ") -> ()\n  }");
}

Value ProgramText::argument(const Shape& shape) {
  arguments_.push_back({text(prefix_, "arg", arguments_.size()), shape});
  return arguments_.back();
}

std::vector<Value> ProgramText::add(std::string_view operation, const std::vector<Value>& operands,
                                    const std::vector<Shape>& results, const std::string& attributes,
                                    const std::string& regions) {
  const auto name = fresh();
  std::vector<Value> values;
  for (std::size_t i = 0; i < results.size(); ++i)
    values.push_back({results.size() == 1 ? name : text(name, "#", i), results[i]});
  write(name, values, operation, operands, attributes, regions);
  return values;
}

void ProgramText::write(const std::string& name, const std::vector<Value>& results, std::string_view operation,
                        const std::vector<Value>& operands, const std::string& attributes, const std::string& regions) {
  write_used(operands);
  const bool is_one = results.size() == 1;
  lines_ +=
      text("  ", name, is_one ? "" : text(":", results.size()), " = \"", operation, "\"(", names_of(operands), ") ",
           regions.empty() ? "" : text("(", regions, ") "), attributes.empty() ? "" : text("{", attributes, "} "),
           ": (", types_of(operands), ") -> ", is_one ? "" : "(", types_of(results), is_one ? "" : ")", "\n");
}

Value ProgramText::add(std::string_view operation, const std::vector<Value>& operands, const Shape& result,
                       const std::string& attributes, const std::string& regions) {
  return add(operation, operands, std::vector<Shape>{result}, attributes, regions)[0];
}

Value ProgramText::filled(const std::string& element, const Shape& shape) {
  const auto made = add("stablehlo.constant", {}, shape, text("value = dense<", element, "> : ", type_of(shape)));
  cheap_[made.name] = [element, shape](ProgramText& program, const Dimensions& permutation) {
    return program.filled(element, {shape.dtype, permuted(shape.sizes, permutation)});
  };
  return made;
}

Value ProgramText::constant(double number, const Shape& shape) { return filled(literal(number, shape.dtype), shape); }
Value ProgramText::integer(std::int64_t number, const Shape& shape) { return filled(std::to_string(number), shape); }

namespace {

// The largest integer of the dtype.
std::int64_t largest_of(DType dtype) {
  const auto bits = 8 * size_of(dtype) - (dtype == DType::uint8 ? 0 : 1);
  return static_cast<std::int64_t>((std::uint64_t{1} << bits) - 1);
}

}  // namespace

Value ProgramText::lowest(const Shape& shape) {
  if (is_floating(shape.dtype)) return constant(-std::numeric_limits<double>::infinity(), shape);
  if (shape.dtype == DType::boolean) return constant(0, shape);
  return integer(shape.dtype == DType::uint8 ? 0 : -largest_of(shape.dtype) - 1, shape);
}

Value ProgramText::highest(const Shape& shape) {
  if (is_floating(shape.dtype)) return constant(std::numeric_limits<double>::infinity(), shape);
  return shape.dtype == DType::boolean ? constant(1, shape) : integer(largest_of(shape.dtype), shape);
}

Value ProgramText::array(const void* data, const Shape& shape) {
  if (shape.elements() == 0) return constant(0, shape);
  const auto* const bytes = static_cast<const unsigned char*>(data);
  if (shape.dtype == DType::boolean) {  // whose bits MLIR would pack
    const auto as_bytes = array(data, {DType::uint8, shape.sizes});
    return convert(as_bytes, DType::boolean);
  }
  return add("stablehlo.constant", {}, shape,
             text("value = dense<\"", hexadecimal(bytes, shape.bytes(), false), "\"> : ", type_of(shape)));
}

Value ProgramText::compare(std::string_view direction, const Value& a, const Value& b) {
  return elementwise("stablehlo.compare", {a, b}, DType::boolean,
                     text("comparison_direction = #stablehlo<comparison_direction ", direction, ">"));
}

Value ProgramText::select(const Value& condition, const Value& yes, const Value& no) {
  return elementwise("stablehlo.select", {condition, yes, no}, yes.shape.dtype);
}

Value ProgramText::convert(const Value& x, DType dtype) {
  return x.shape.dtype == dtype ? x : elementwise("stablehlo.convert", {x}, dtype);
}

Value ProgramText::reshape(const Value& x, std::vector<std::int64_t> sizes) {
  return sizes == x.shape.sizes ? x : add("stablehlo.reshape", {x}, {x.shape.dtype, std::move(sizes)});
}

Value ProgramText::transpose(const Value& x, const std::vector<std::int64_t>& permutation) {
  const auto [source, before] = order_of(x);
  const auto both = permuted(before, permutation);
  if (std::is_sorted(both.begin(), both.end())) return source;
  if (const auto product = transposed_product(source, both)) return *product;
  const Value made{fresh(), {x.shape.dtype, permuted(x.shape.sizes, permutation)}};
  transposed_[made.name] = {source, both};
  not_written_.insert(made.name);
  return made;
}

Value ProgramText::broadcast(const Value& x, std::vector<std::int64_t> sizes,
                             const std::vector<std::int64_t>& dimensions) {
  if (sizes == x.shape.sizes && std::is_sorted(dimensions.begin(), dimensions.end())) return x;
  const auto made =
      add("stablehlo.broadcast_in_dim", {x}, {x.shape.dtype, sizes}, "broadcast_dimensions = " + array_of(dimensions));
  cheap_[made.name] = [x, sizes, dimensions](ProgramText& program, const Dimensions& permutation) {
    Dimensions moved;
    for (const auto dimension : dimensions) moved.push_back(place_of(dimension, permutation));
    return program.broadcast(x, permuted(sizes, permutation), moved);
  };
  return made;
}

Value ProgramText::iota(const Shape& shape, std::int64_t dimension) {
  const auto made = add("stablehlo.iota", {}, shape, text("iota_dimension = ", dimension, " : i64"));
  cheap_[made.name] = [shape, dimension](ProgramText& program, const Dimensions& permutation) {
    return program.iota({shape.dtype, permuted(shape.sizes, permutation)}, place_of(dimension, permutation));
  };
  return made;
}

Value ProgramText::slice(const Value& x, const std::vector<std::int64_t>& begin, const std::vector<std::int64_t>& end,
                         const std::vector<std::int64_t>& step) {
  if (const auto [source, order] = order_of(x); source.name != x.name) {
    const auto back = inverse(order);
    return transpose(slice(source, permuted(begin, back), permuted(end, back), permuted(step, back)), order);
  }
  Shape result{x.shape.dtype, {}};
  for (std::size_t i = 0; i < begin.size(); ++i) result.sizes.push_back((end[i] - begin[i] + step[i] - 1) / step[i]);
  return add(
      "stablehlo.slice", {x}, result,
      text("start_indices = ", array_of(begin), ", limit_indices = ", array_of(end), ", strides = ", array_of(step)));
}

Value ProgramText::pad(const Value& x, double with, const std::vector<std::int64_t>& low,
                       const std::vector<std::int64_t>& high, const std::vector<std::int64_t>& between) {
  if (const auto [source, order] = order_of(x); source.name != x.name) {
    const auto back = inverse(order);
    return transpose(pad(source, with, permuted(low, back), permuted(high, back), permuted(between, back)), order);
  }
  Shape result{x.shape.dtype, {}};
  for (std::size_t i = 0; i < low.size(); ++i) {
    const auto size = x.shape.sizes[i];
    result.sizes.push_back(low[i] + high[i] + size + std::max<std::int64_t>(size - 1, 0) * between[i]);
  }
  return add("stablehlo.pad", {x, constant(with, {x.shape.dtype, {}})}, result,
             text("edge_padding_low = ", array_of(low), ", edge_padding_high = ", array_of(high),
                  ", interior_padding = ", array_of(between)));
}

Value ProgramText::concatenate(const std::vector<Value>& parts, std::int64_t dimension) {
  auto result = parts[0].shape;
  auto& size = result.sizes[static_cast<std::size_t>(dimension)];
  size = 0;
  for (const auto& part : parts) size += part.shape.sizes[static_cast<std::size_t>(dimension)];
  return add("stablehlo.concatenate", parts, result, text("dimension = ", dimension, " : i64"));
}

Value ProgramText::reduce(std::string_view operation, const Value& x, const Value& initial,
                          const std::vector<std::int64_t>& dimensions) {
  if (const auto [source, order] = order_of(x); source.name != x.name) {
    // The dimensions that stay come in the source's order.
    Dimensions vanish, stay;
    for (std::size_t i = 0; i < order.size(); ++i) (contains(dimensions, i) ? vanish : stay).push_back(order[i]);
    std::sort(vanish.begin(), vanish.end());
    auto sorted = stay;
    std::sort(sorted.begin(), sorted.end());
    Dimensions places;
    for (const auto dimension : stay) places.push_back(place_of(dimension, sorted));
    return transpose(reduce(operation, source, initial, vanish), places);
  }
  Shape result{x.shape.dtype, {}};
  for (std::size_t i = 0; i < x.shape.sizes.size(); ++i)
    if (!contains(dimensions, i)) result.sizes.push_back(x.shape.sizes[i]);
  return add("stablehlo.reduce", {x, initial}, result, "dimensions = " + array_of(dimensions),
             reducer(operation, x.shape.dtype));
}

Value ProgramText::dot(const Value& a, const Value& b, const std::vector<std::int64_t>& contract_a,
                       const std::vector<std::int64_t>& contract_b, const std::vector<std::int64_t>& batch_a,
                       const std::vector<std::int64_t>& batch_b) {
  Shape result{a.shape.dtype, {}};
  for (const auto i : batch_a) result.sizes.push_back(a.shape.sizes[static_cast<std::size_t>(i)]);
  for (std::size_t i = 0; i < a.shape.sizes.size(); ++i)
    if (!contains(batch_a, i) && !contains(contract_a, i)) result.sizes.push_back(a.shape.sizes[i]);
  for (std::size_t i = 0; i < b.shape.sizes.size(); ++i)
    if (!contains(batch_b, i) && !contains(contract_b, i)) result.sizes.push_back(b.shape.sizes[i]);
  const auto attributes = text("dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = ", numbers_of(batch_a),
                               ", rhs_batching_dimensions = ", numbers_of(batch_b),
                               ", lhs_contracting_dimensions = ", numbers_of(contract_a),
                               ", rhs_contracting_dimensions = ", numbers_of(contract_b), ">, ", kHighestPrecision);
  if (!batch_a.empty()) return add("stablehlo.dot_general", {a, b}, result, attributes);
  const Value made{fresh(), result};
  products_[made.name] = {a, b, contract_a, contract_b, attributes};
  not_written_.insert(made.name);
  return made;
}

namespace {

std::string group_of_all(int replicas) {
  std::vector<std::int64_t> all;
  for (int i = 0; i < replicas; ++i) all.push_back(i);
  return text("replica_groups = dense<[", numbers_of(all), "]> : tensor<1x", replicas, "xi64>");
}

}  // namespace

std::vector<Value> ProgramText::all_reduce(std::string_view operation, const std::vector<Value>& values, int replicas) {
  std::vector<Shape> shapes;
  for (const auto& value : values) shapes.push_back(value.shape);
  return add("stablehlo.all_reduce", values, shapes, group_of_all(replicas), reducer(operation, shapes[0].dtype));
}

Value ProgramText::all_gather(const Value& x, std::int64_t dimension, int replicas) {
  auto result = x.shape;
  result.sizes[static_cast<std::size_t>(dimension)] *= replicas;
  return add("stablehlo.all_gather", {x}, result,
             text("all_gather_dim = ", dimension, " : i64, ", group_of_all(replicas)));
}

std::string ProgramText::function(std::string_view name, const std::vector<Value>& outputs,
                                  const std::vector<std::pair<int, int>>& aliases) const {
  std::vector<std::string> arguments;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    auto argument = text(arguments_[i].name, ": ", type_of(arguments_[i].shape));
    for (const auto& [from, to] : aliases)
      if (from == static_cast<int>(i)) argument += text(" {tf.aliasing_output = ", to, " : i32}");
    arguments.push_back(argument);
  }
  return text("func.func ", name, "(", join(arguments), ") -> (", types_of(outputs), ") {\n", lines_, "  return ",
              names_of(outputs), " : ", types_of(outputs), "\n}\n");
}

std::string ProgramText::finish(const std::vector<Value>& outputs, const std::vector<std::pair<int, int>>& aliases,
                                int replicas) {
  write_used(outputs);
  return text("module @program attributes {mhlo.num_replicas = ", replicas, " : i32} {\n",
              function("public @main", outputs, aliases), "}\n");
}

}  // namespace lockstep::pjrt
