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

#include "pjrt/stablehlo.h"

namespace c10 {
class OperatorHandle;
}

namespace lockstep::tpu {

class Trace;
using pjrt::Shape;
using pjrt::Value;
using Sizes = std::vector<std::int64_t>;

class Call {
 public:
  Call(Trace& trace, const c10::OperatorHandle& operation, torch::jit::Stack& stack);

  const std::string& name() const { return name_; }  // "aten::add.Tensor"
  pjrt::ProgramText& program();

  // The arguments, by their places in the operator's schema.
  bool has(std::size_t i) const;  // not None
  Value value(std::size_t i);     // of a tensor; host memory's becomes a constant
  std::vector<Value> values(std::size_t i);
  at::Tensor tensor(std::size_t i) const { return arguments_[i].toTensor(); }
  at::Scalar scalar(std::size_t i) const { return arguments_[i].toScalar(); }
  std::int64_t integer(std::size_t i) const { return arguments_[i].toInt(); }
  double real(std::size_t i) const { return arguments_[i].toScalar().toDouble(); }
  bool flag(std::size_t i) const { return arguments_[i].toBool(); }
  Sizes integers(std::size_t i) const { return arguments_[i].toIntVector(); }
  std::string word(std::size_t i) const { return arguments_[i].toStringRef(); }
  at::ScalarType dtype(std::size_t i) const { return static_cast<at::ScalarType>(arguments_[i].toInt()); }
  const c10::IValue& argument(std::size_t i) const { return arguments_[i]; }

  // Of `i`, a dimension that may count from the end, of a value of that rank.
  static std::int64_t dimension(std::int64_t i, std::size_t rank) {
    return i < 0 ? i + static_cast<std::int64_t>(rank) : i;
  }

  void returns(std::vector<Value> results);
  void returns_none(std::size_t i);  // result i is undefined; the others are given

  // What the operator returns, once lowered, onto LibTorch's stack.
  void push_results();

 private:
  Trace& trace_;
  const std::string name_;
  torch::jit::Stack& stack_;
  std::vector<c10::IValue> arguments_;
  std::vector<std::optional<Value>> results_;
};

// How an operator becomes operations of the program.
using Lowering = std::function<void(Call&)>;

// By the operators' names, "aten::add.Tensor". Each file of lowerings adds its own.
using Lowerings = std::map<std::string, Lowering>;
const Lowerings& lowerings();

void add_pointwise(Lowerings& table);
void add_reductions(Lowerings& table);
void add_shapes(Lowerings& table);
void add_products(Lowerings& table);
void add_convolutions(Lowerings& table);
void add_pooling(Lowerings& table);
void add_indexing(Lowerings& table);

}  // namespace lockstep::tpu
