#include "tpu/step_trace.h"

#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <string_view>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "tpu/composed.h"

namespace lockstep::tpu {
namespace {

// True for operators that make tensors of sizes alone, on the device that is named: the host's where none is. In a step
// they mean the step's device, as in a program for a GPU that names it everywhere. Not those whose memory the host
// fills.
bool makes_tensors(const ops::OperatorCall& call) {
  const std::string_view name = call.name();
  return !name.starts_with("aten::empty") && name != "aten::scalar_tensor" && name != "aten::from_file";
}

// The parameter of the host has the gradient as well, for code between backward and the update, such as
// clip_grad_norm_.
class GradientForHost final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientForHost(at::Tensor host) : host_(std::move(host)) {}
  void operator()(const at::Tensor& leaf) override { host_.mutable_grad() = leaf.grad(); }

 private:
  at::Tensor host_;
};

const char* operation_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean: return "stablehlo.add";
    case ReduceOp::min: return "stablehlo.minimum";
    case ReduceOp::max: return "stablehlo.maximum";
    case ReduceOp::product: break;
  }
  return "stablehlo.multiply";
}

}  // namespace

TracedStep::TracedStep(int replicas, bool for_cpu, FindVariable find)
    : trace_(for_cpu),
      replicas_(replicas),
      find_(std::move(find)),
      mode_([this](const auto& call) { return see(call); }) {
  ops::set_current_trace(this);
}

TracedStep::~TracedStep() {
  for (const auto& used : layout_.variables) {
    for (auto host : used.variable->host())
      if (host.is_leaf() && host.grad().defined() && is_traced(host.grad())) host.mutable_grad().reset();
  }
  ops::set_current_trace(nullptr);
}

std::vector<at::Tensor> TracedStep::add_inputs(const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> inputs;
  for (const auto& tensor : like) {
    inputs.push_back(trace_.argument(tensor.sizes(), tensor.scalar_type()));
    layout_.inputs.push_back(trace_.number_of_argument(inputs.back()));
  }
  return inputs;
}

at::Tensor TracedStep::value_of(ops::DeviceVariable& variable) {
  return use(static_cast<Variable&>(variable).shared_from_this());
}

at::Tensor TracedStep::use(const std::shared_ptr<Variable>& variable) {
  if (const auto found = places_.find(variable.get()); found != places_.end()) return leaves_[found->second];
  const auto& host = variable->host()[0];
  auto leaf = trace_.argument(host.sizes(), host.scalar_type());
  layout_.variables.push_back({variable, trace_.number_of_argument(leaf)});
  if (host.requires_grad()) {
    leaf.requires_grad_();
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<GradientForHost>(host));
  }
  places_.emplace(variable.get(), leaves_.size());
  return leaves_.emplace_back(std::move(leaf));
}

std::vector<at::Tensor> TracedStep::all_reduce(ReduceOp op, const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> results;
  for (const auto& value : values) results.push_back(value.detach());
  if (replicas_ > 1) results = trace_.all_reduce(operation_of(op), results, replicas_);
  if (op != ReduceOp::mean) return results;
  for (auto& result : results) result = result / replicas_;
  return results;
}

at::Tensor TracedStep::all_gather(const at::Tensor& value, std::int64_t axis) {
  return trace_.all_gather(value.detach(), axis < 0 ? axis + value.dim() : axis, replicas_);
}

at::Tensor TracedStep::number(at::ScalarType dtype, std::function<double(std::int64_t)> value) {
  auto scalar = trace_.argument({}, dtype);
  layout_.numbers.push_back({trace_.number_of_argument(scalar), dtype, std::move(value)});
  return scalar;
}

std::string TracedStep::finish(const std::vector<at::Tensor>& results, int steps) {
  auto outputs = results;
  layout_.results = static_cast<int>(results.size());
  std::vector<std::pair<int, int>> aliases;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {  // in the order of their use, so that a step has the same text
    auto& used = layout_.variables[i];
    if (trace_.is_argument(leaves_[i], used.argument)) continue;
    used.result = static_cast<int>(outputs.size());
    aliases.emplace_back(used.argument, used.result);
    outputs.push_back(leaves_[i]);
  }
  layout_.seed = trace_.seed_argument();
  layout_.arguments = trace_.arguments();
  std::vector<bool> stacked(static_cast<std::size_t>(layout_.arguments), true);
  for (const auto& used : layout_.variables) stacked[static_cast<std::size_t>(used.argument)] = false;
  return trace_.finish(outputs, aliases, replicas_, steps, stacked);
}

bool TracedStep::see(const ops::OperatorCall& call) {
  const auto& arguments = call.schema().arguments();
  bool takes_tensors = false;
  std::size_t device_at = arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (call.argument(i).isTensor() || call.argument(i).isTensorList()) takes_tensors = true;
    if (arguments[i].name() == "device") device_at = i;
  }
  if (takes_tensors) {
    const bool replaced = replace_host_tensors(call);
    check_in_place(call);
    if (compose(call)) return true;
    if (replaced) call.again();
    return replaced;
  }
  if (device_at == arguments.size() || !makes_tensors(call)) return false;
  auto& where = call.argument(device_at);
  if (!where.isNone() && !where.toDevice().is_cpu()) return false;
  where = device();
  call.again();
  return true;
}

// Functionalization makes others of operators that change a tensor in place, which may have results of another shape.
void TracedStep::check_in_place(const ops::OperatorCall& call) const {
  if (!call.writes(0) || !call.tensor(0).defined() || call.tensor(0).device() != device()) return;
  const auto operation = c10::Dispatcher::singleton().findSchema(call.schema().operator_name());
  std::vector<c10::IValue> arguments;
  for (std::size_t i = 0; i < call.arguments(); ++i) arguments.push_back(call.argument(i));
  const auto refusal = operation ? refusal_of(*operation, arguments) : "";
  if (!refusal.empty()) {
    throw InvalidArgument(
        text("the operator ", call.name(), " (operator ", trace_.operators().size() + 1, " of the step): ", refusal));
  }
}

bool TracedStep::replace_host_tensors(const ops::OperatorCall& call) {
  bool replaced = false;
  const auto in_step = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    const auto variable = find_(tensor);
    if (variable == nullptr) return tensor;
    replaced = true;
    return use(variable);
  };
  for (std::size_t i = 0; i < call.arguments(); ++i) call.argument(i) = with_tensors(call.argument(i), in_step);
  return replaced;
}

// Replaces operators that LibTorch would compute over all examples of a batch, whether they count or not.
bool TracedStep::compose(const ops::OperatorCall& call) {
  if (call.name() != "aten::batch_norm" || call.tensor(0).device() != device()) return false;
  call.finish(batch_norm(call, row_counts(call.tensor(0).size(0))));
  return true;
}

at::Tensor TracedStep::row_counts(std::int64_t rows) const {
  if (!counts_.defined() || rows % counts_.size(0) != 0) return {};
  const auto times = rows / counts_.size(0);
  return times == 1 ? counts_ : counts_.unsqueeze(1).expand({counts_.size(0), times}).reshape({rows});
}

void TracedStep::keep_without_examples(ops::DeviceVariable& variable) {
  const auto found = places_.find(static_cast<const Variable*>(&variable));
  if (found == places_.end() || !counts_.defined()) return;
  const auto& leaf = leaves_[found->second];
  const int argument = layout_.variables[found->second].argument;
  if (!trace_.is_argument(leaf, argument))
    leaf.copy_(at::where(counts_.sum() > 0, leaf, trace_.argument_again(argument)));
}

at::Tensor TracedStep::counted(std::int64_t rows) {
  const auto counts = row_counts(rows);
  return counts.defined() ? counts.sum() : at::full({}, static_cast<double>(rows), at::TensorOptions(device()));
}

}  // namespace lockstep::tpu
