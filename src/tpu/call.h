// One operator's call while a program is traced, as its lowering sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tpu/pjrt/stablehlo.h"

namespace c10 {
class OperatorHandle;
}

namespace lockstep::tpu {

class Trace;
std::string name_of_operator(const c10::OperatorHandle& operation);  // "aten::add.Tensor"

using pjrt::Shape;
using pjrt::Value;
using Sizes = std::vector<std::int64_t>;

class Call {
 public:
  Call(Trace& trace, const c10::OperatorHandle& operation, torch::jit::Stack& stack);

  const std::string& name() const { return name_; }  // "aten::add.Tensor"
  pjrt::ProgramText& program();
  bool is_for_cpu() const;  // the program

  bool writes_several() const { return writes_several_; }

  // The arguments, by their places in the operator's schema.
  bool has(std::size_t i) const;  // not None
  Value value(std::size_t i);     // of a tensor
  std::vector<Value> values(std::size_t i);
  Value array(std::size_t i);  // of a tensor, which may also be one of host memory
  at::Tensor tensor(std::size_t i) const { return arguments_[i].toTensor(); }
  at::Scalar scalar(std::size_t i) const { return arguments_[i].toScalar(); }
  std::int64_t integer(std::size_t i) const { return arguments_[i].toInt(); }
  double real(std::size_t i) const { return arguments_[i].toScalar().toDouble(); }
  bool flag(std::size_t i) const { return arguments_[i].toBool(); }
  Sizes integers(std::size_t i) const { return arguments_[i].toIntVector(); }
  std::string word(std::size_t i) const { return arguments_[i].toStringRef(); }
  at::ScalarType dtype(std::size_t i) const { return static_cast<at::ScalarType>(arguments_[i].toInt()); }
  DType dtype(std::size_t i, DType otherwise) const;  // otherwise: where the argument names none
  const c10::IValue& argument(std::size_t i) const { return arguments_[i]; }

  // Argument i, a number, as each element.
  Value number(std::size_t i, const Shape& shape);

  // The dimension `i`, which may count from the end, of a value with `rank` dimensions, counted from the front.
  std::int64_t dimension(std::int64_t i, std::size_t rank) const;

  Value random_words(std::int64_t count);  // Trace::random_words

  // Throws Error with the operator's name.
  [[noreturn]] void refuse(const std::string& why) const;
  [[noreturn]] void refuse_arguments(const std::string& why) const;  // InvalidArgument: LibTorch refuses them as well
  void require(bool holds, const std::string& otherwise) const;      // InvalidArgument
  void require_equal_dtypes(std::size_t i, std::size_t k) const;     // of two tensors
  std::string place() const;
  [[noreturn]] void refuse_unknown() const;  // an operator without lowering

  void returns(std::vector<Value> results);
  void returns(const std::vector<at::Tensor>& results);  // of other operators; undefined ones too
  void returns(const at::Tensor& result) { returns(std::vector<at::Tensor>{result}); }
  // Wraps the result for programs, also where functionalization calls.
  void returns_wrapped(Value result);
  void returns_none(std::size_t i);  // result i is undefined; the others are given

  // Puts the operator's results, from the lowering of that name, onto LibTorch's stack.
  void push_results(const std::string& lowering);

 private:
  Value value_in(const at::Tensor& tensor);
  Value array_in(const at::Tensor& tensor);

  Trace& trace_;
  const std::string name_;
  torch::jit::Stack& stack_;
  std::vector<c10::IValue> arguments_;
  std::vector<std::optional<Value>> results_;
  bool wraps_ = false, writes_several_ = false;
  at::Tensor out_;  // which gets the result: an argument `out`, or what the operator changes in place
};

// How an operator becomes operations of the program.
using Lowering = std::function<void(Call&)>;

// Lowerings by operators' names, "aten::add.Tensor". Each file of lowerings adds its own.
using Lowerings = std::map<std::string, Lowering>;
const Lowerings& lowerings();

DType default_dtype();                   // LibTorch's, of new tensors
Sizes all_dimensions(std::size_t rank);  // 0, 1, ...

// The dimensions that argument i, a number or a list, names; all where it names none.
Sizes dimensions_in(Call& call, std::size_t i, std::size_t rank);

// x with the sizes that it has beside others: its dimensions are the last ones, and those of size 1 are repeated.
Value spread(Call& call, const Value& x, const Sizes& sizes);

// Argument 0 of a sum or a product, with the dtype that the argument in place `dtype` names; else integers are int64.
Value summand(Call& call, std::size_t dtype);

// The sum over dimensions, which vanish; 16-bit numbers are added in float32.
Value sum_over(Call& call, const Value& x, const Sizes& dimensions);

void add_pointwise(Lowerings& table);
void add_reductions(Lowerings& table);
void add_shapes(Lowerings& table);
void add_products(Lowerings& table);
void add_convolutions(Lowerings& table);
void add_pooling(Lowerings& table);
void add_adaptive_pooling(Lowerings& table);
void add_indexing(Lowerings& table);
void add_random(Lowerings& table);
void add_refused(Lowerings& table);
void add_composed(Lowerings& table);
void add_norms(Lowerings& table);
void add_arithmetic(Lowerings& table);
void add_ordering(Lowerings& table);

}  // namespace lockstep::tpu
