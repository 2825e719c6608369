// A program as it is written, operation by operation: StableHLO in MLIR's generic form
// (https://openxla.org/stablehlo/spec).
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tpu/pjrt/client.h"

namespace lockstep::pjrt {

// A result of an operation of a ProgramText, or an argument of the program.
struct Value {
  std::string name;  // "%5"
  Shape shape;
};

// Number i of the result is number permutation[i]; and the permutation that takes another one back.
std::vector<std::int64_t> permuted(const std::vector<std::int64_t>& values,
                                   const std::vector<std::int64_t>& permutation);
std::vector<std::int64_t> inverse(const std::vector<std::int64_t>& permutation);

bool is_floating(DType dtype);
std::string type_of(const Shape& shape);                        // "tensor<2x3xf32>"
std::string array_of(std::span<const std::int64_t> numbers);    // "array<i64: 1, 2>"
std::string numbers_of(std::span<const std::int64_t> numbers);  // "[1, 2]"

// One thread at a time uses it.
class ProgramText {
 public:
  // The next argument of the program.
  Value argument(const Shape& shape);

  // One operation with one result. `attributes`: what stands in braces; `regions`: joined by commas.
  Value add(std::string_view operation, const std::vector<Value>& operands, const Shape& result,
            const std::string& attributes = "", const std::string& regions = "");
  // One operation with several results.
  std::vector<Value> add(std::string_view operation, const std::vector<Value>& operands,
                         const std::vector<Shape>& results, const std::string& attributes = "",
                         const std::string& regions = "");

  // Returns a region of an operation, which gets arguments of these shapes and returns what `body` does. No region is
  // inside of another.
  using Body = std::function<std::vector<Value>(ProgramText& inside, const std::vector<Value>& arguments)>;
  static std::string region(const std::vector<Shape>& arguments, const Body& body);

  // Every element is `number`, which must be one of the dtype's.
  Value constant(double number, const Shape& shape);
  Value integer(std::int64_t number, const Shape& shape);
  // The least and the largest number of the shape's dtype: of floating-point numbers infinity.
  Value lowest(const Shape& shape);
  Value highest(const Shape& shape);
  // The elements in row-major order.
  Value array(const void* data, const Shape& shape);

  // One operation on each element of the operands, which have the result's sizes. Where some are transposed and it can
  // be, the operation is computed with their sources, and the result is transposed. So a chain of such operations keeps
  // one order of dimensions, and layouts do not change within it.
  Value elementwise(std::string_view operation, const std::vector<Value>& operands, DType dtype,
                    const std::string& attributes = "");

  // StableHLO's specification says what these do.
  Value unary(std::string_view operation, const Value& x) { return elementwise(operation, {x}, x.shape.dtype); }
  Value binary(std::string_view operation, const Value& a, const Value& b) {
    return elementwise(operation, {a, b}, a.shape.dtype);
  }
  Value plus(const Value& a, const Value& b) { return binary("stablehlo.add", a, b); }
  Value plus(const Value& a, double b) { return plus(a, constant(b, a.shape)); }
  Value minus(const Value& a, const Value& b) { return binary("stablehlo.subtract", a, b); }
  Value times(const Value& a, const Value& b) { return binary("stablehlo.multiply", a, b); }
  Value times(const Value& a, double b) { return times(a, constant(b, a.shape)); }
  Value over(const Value& a, const Value& b) { return binary("stablehlo.divide", a, b); }
  Value compare(std::string_view direction, const Value& a, const Value& b);  // "LT"
  Value select(const Value& condition, const Value& yes, const Value& no);
  Value convert(const Value& x, DType dtype);
  Value reshape(const Value& x, std::vector<std::int64_t> sizes);
  // Dimension i of the result is dimension permutation[i] of x. Written where the result is first used.
  Value transpose(const Value& x, const std::vector<std::int64_t>& permutation);

  // The value from which x was transposed, and how; x itself where it was not.
  struct Order {
    Value source;
    std::vector<std::int64_t> permutation;
  };
  Order order_of(const Value& x) const;
  // Dimension i of x becomes `dimensions[i]` of the result.
  Value broadcast(const Value& x, std::vector<std::int64_t> sizes, const std::vector<std::int64_t>& dimensions);
  Value iota(const Shape& shape, std::int64_t dimension);
  Value slice(const Value& x, const std::vector<std::int64_t>& begin, const std::vector<std::int64_t>& end,
              const std::vector<std::int64_t>& step);
  Value pad(const Value& x, double with, const std::vector<std::int64_t>& low, const std::vector<std::int64_t>& high,
            const std::vector<std::int64_t>& between);
  Value concatenate(const std::vector<Value>& parts, std::int64_t dimension);
  // Reduces by "stablehlo.add", "stablehlo.maximum", ... from the scalar `initial` on; the dimensions vanish.
  Value reduce(std::string_view operation, const Value& x, const Value& initial,
               const std::vector<std::int64_t>& dimensions);
  // Contracts and batches the named dimensions. The result's: batches, then what is left of a, then of b.
  Value dot(const Value& a, const Value& b, const std::vector<std::int64_t>& contract_a,
            const std::vector<std::int64_t>& contract_b, const std::vector<std::int64_t>& batch_a = {},
            const std::vector<std::int64_t>& batch_b = {});
  // Reduces values of one dtype together.
  std::vector<Value> all_reduce(std::string_view operation, const std::vector<Value>& values, int replicas);
  Value all_gather(const Value& x, std::int64_t dimension, int replicas);

  // The whole program. aliases: argument i becomes output j, whose memory it gives.
  std::string finish(const std::vector<Value>& outputs, const std::vector<std::pair<int, int>>& aliases, int replicas);

  // Returns a program that makes the written step `steps` times, one after the other. Arguments that `stacked`,
  // [argument], names are [steps, ...], and so are outputs that are no aliases. An alias's output in one step is its
  // argument in the next one. In file steps_text.cc.
  std::string finish(const std::vector<Value>& outputs, const std::vector<std::pair<int, int>>& aliases, int replicas,
                     int steps, const std::vector<bool>& stacked);

  const std::vector<Value>& arguments() const { return arguments_; }

 private:
  std::string function(std::string_view name, const std::vector<Value>& outputs,
                       const std::vector<std::pair<int, int>>& aliases) const;
  std::string fresh() { return prefix_ + std::to_string(next_++); }

  using Dimensions = std::vector<std::int64_t>;
  struct Product {
    Value a, b;
    Dimensions contract_a, contract_b;
    std::string attributes;
  };
  // A value again, with dimension permutation[i] in place i.
  using Again = std::function<Value(ProgramText& program, const Dimensions& permutation)>;

  Value filled(const std::string& element, const Shape& shape);

  // Writes what is written only where it is first used: transposed values, and products without batches.
  void write_used(const std::vector<Value>& values);
  // name: of the results in common.
  void write(const std::string& name, const std::vector<Value>& results, std::string_view operation,
             const std::vector<Value>& operands, const std::string& attributes, const std::string& regions);
  std::optional<Value> transposed_product(const Value& x, const Dimensions& permutation);
  std::optional<Value> in_order(const Value& x, const Dimensions& permutation);

  std::vector<Value> arguments_;
  std::string lines_;
  std::string prefix_ = "%";  // of names
  int next_ = 0;
  std::map<std::string, Order> transposed_;  // values by name
  std::map<std::string, Product> products_;
  std::set<std::string> not_written_;   // of transposed_ and products_
  std::map<std::string, Again> cheap_;  // values that are made in any order of dimensions: constants and their kind
};

std::string names_of(const std::vector<Value>& values);  // "%1, %5"
std::string types_of(const std::vector<Value>& values);

// The region of a reduction by `operation` of two scalars.
std::string reducer(std::string_view operation, DType dtype);

// Products in full precision: otherwise TPUs multiply float32 in bfloat16.
inline constexpr const char* kHighestPrecision =
    "precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]";

}  // namespace lockstep::pjrt
