#include "tpu/call.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <numeric>
#include <set>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"
#include "tpu/trace.h"

namespace lockstep::tpu {

std::string name_of_operator(const c10::OperatorHandle& operation) {
  const auto& name = operation.schema().operator_name();
  return name.overload_name.empty() ? name.name : text(name.name, ".", name.overload_name);
}

Call::Call(Trace& trace, const c10::OperatorHandle& operation, torch::jit::Stack& stack)
    : trace_(trace), name_(name_of_operator(operation)), stack_(stack) {
  const auto count = operation.schema().arguments().size();
  const auto from = torch::jit::last(stack, count);
  arguments_.assign(from.begin(), from.end());
  torch::jit::drop(stack, count);
  if (count == 0) return;
  std::size_t written = 0;
  for (const auto& argument : operation.schema().arguments())
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ++written;
  writes_several_ = written > 1;
  const auto& schema = operation.schema();
  const auto* const first = schema.arguments().front().alias_info();
  if (schema.arguments().back().name() == "out") {
    out_ = arguments_.back().toTensor();
    arguments_.pop_back();
  } else if (first != nullptr && first->isWrite()) {
    out_ = tensor(0);
  }
}

DType Call::dtype(std::size_t i, DType otherwise) const { return has(i) ? ops::dtype_of(dtype(i)) : otherwise; }

pjrt::ProgramText& Call::program() { return trace_.program_; }

bool Call::is_for_cpu() const { return trace_.for_cpu_; }

Value Call::random_words(std::int64_t count) { return trace_.random_words(count); }

bool Call::has(std::size_t i) const {
  if (i >= arguments_.size()) return false;
  const auto& argument = arguments_[i];
  return !argument.isNone() && (!argument.isTensor() || argument.toTensor().defined());
}

// Names the known operators that are called alike.
void Call::refuse_unknown() const {
  const auto base = [](const std::string& name) {  // "add", of "aten::add.Tensor"
    const auto begin = name.find("::") + 2;
    return name.substr(begin, name.find('.') - begin);
  };
  std::set<std::string> names;
  for (const auto& [name, lowering] : lowerings()) names.insert(base(name));
  std::string near;
  for (const auto& name : near_names(base(name_), {names.begin(), names.end()}))
    near += text(near.empty() ? "; there are aten::" : ", aten::", name);
  throw Error(text("the operator ", name_, place(), " cannot be compiled for a TPU", near));
}

// The place of the operator in the step.
std::string Call::place() const {
  const auto& before = trace_.operators_;
  return before.empty() ? "" : text(" (operator ", before.size() + 1, " of the step, after ", before.back(), ")");
}

void Call::refuse_arguments(const std::string& why) const {
  throw InvalidArgument(text("the operator ", name_, place(), ": ", why));
}

void Call::require(bool holds, const std::string& otherwise) const {
  if (!holds) refuse_arguments(otherwise);
}

void Call::require_equal_dtypes(std::size_t i, std::size_t k) const {
  const auto a = tensor(i).scalar_type(), b = tensor(k).scalar_type();
  require(a == b, text("its tensors have the dtypes ", a, " and ", b, "; they must be equal"));
}

void Call::refuse(const std::string& why) const {
  throw Error(text("the operator ", name_, place(), " cannot be compiled for a TPU: ", why));
}

// A number that LibTorch keeps as a tensor becomes a constant; a larger tensor would be a constant by mistake.
Value Call::value_in(const at::Tensor& tensor) {
  if (is_traced(tensor)) return value_of(tensor);
  if (tensor.dim() > 0)
    refuse(
        "it got a tensor with values in host memory; register it as a buffer of the module, or copy it to the device "
        "of the step's other tensors, as by .to(x.device())");
  return array_in(tensor);
}

Value Call::array_in(const at::Tensor& tensor) {
  if (is_traced(tensor)) return value_of(tensor);
  const auto values = tensor.contiguous();
  return program().array(values.const_data_ptr(), {ops::dtype_of(values.scalar_type()), values.sizes().vec()});
}

Value Call::value(std::size_t i) { return value_in(tensor(i)); }
Value Call::array(std::size_t i) { return array_in(tensor(i)); }

std::vector<Value> Call::values(std::size_t i) {
  std::vector<Value> all;
  for (const auto& tensor : arguments_[i].toTensorVector()) all.push_back(value_in(tensor));
  return all;
}

// Converts numbers as LibTorch does: towards zero.
Value Call::number(std::size_t i, const Shape& shape) {
  const auto number = scalar(i);
  if (pjrt::is_floating(shape.dtype) || shape.dtype == DType::boolean)
    return program().constant(number.toDouble(), shape);
  return program().integer(number.isFloatingPoint() ? static_cast<std::int64_t>(number.toDouble()) : number.toLong(),
                           shape);
}

std::int64_t Call::dimension(std::int64_t i, std::size_t rank) const {
  const auto count = static_cast<std::int64_t>(rank);
  if (i < -count || i >= count) refuse(text("a tensor of ", rank, " dimensions has no dimension ", i));
  return i < 0 ? i + count : i;
}

DType default_dtype() { return ops::dtype_of(at::typeMetaToScalarType(at::get_default_dtype())); }

Sizes all_dimensions(std::size_t rank) {
  Sizes dimensions(rank);
  std::iota(dimensions.begin(), dimensions.end(), 0);
  return dimensions;
}

Value spread(Call& call, const Value& x, const Sizes& sizes) {
  auto dimensions = all_dimensions(sizes.size());
  dimensions.erase(dimensions.begin(), dimensions.end() - static_cast<std::ptrdiff_t>(x.shape.sizes.size()));
  return call.program().broadcast(x, sizes, dimensions);
}

void Call::returns(std::vector<Value> results) {
  results_.clear();
  for (auto& result : results) results_.emplace_back(std::move(result));
}

void Call::returns(const std::vector<at::Tensor>& results) {
  results_.clear();
  for (const auto& result : results) {
    if (result.defined())
      results_.emplace_back(value_in(result));
    else
      results_.emplace_back();
  }
}

void Call::returns_wrapped(Value result) {
  returns({std::move(result)});
  wraps_ = true;
}

void Call::returns_none(std::size_t i) {
  results_.insert(results_.begin() + static_cast<std::ptrdiff_t>(i), std::nullopt);
}

// Operators that functionalization calls give tensors that it wraps. Those that programs call by themselves, such as
// at::zeros, give tensors that they can change in place.
void Call::push_results(const std::string& lowering) {
  trace_.operators_.push_back(lowering);
  const bool is_inside = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Functionalize);
  for (auto& result : results_) {
    if (out_.defined()) {
      rebind(out_, program().convert(*result, ops::dtype_of(out_.scalar_type())));
      torch::jit::push(stack_, out_);
    } else if (!result) {
      torch::jit::push(stack_, at::Tensor());
    } else {
      torch::jit::push(stack_, is_inside && !wraps_ ? traced(std::move(*result)) : wrapped(std::move(*result)));
    }
  }
}

}  // namespace lockstep::tpu
