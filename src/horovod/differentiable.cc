#include "horovod/differentiable.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>

namespace lockstep::horovod {
namespace {

// As a node of the graph keeps it.
struct KeptBackward : torch::CustomClassHolder {
  explicit KeptBackward(Backward function) : call(std::move(function)) {}
  const Backward call;
};

struct Node : torch::autograd::Function<Node> {
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList,
                         const std::function<Tensors()>& operation, const Backward& backward) {
    context->saved_data["backward"] = c10::IValue::make_capsule(c10::make_intrusive<KeptBackward>(backward));
    auto results = operation();
    for (auto& result : results) result = result.variable_data();  // of their own, no views: users may change them
    return results;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto kept = context->saved_data["backward"].toCapsule();
    auto of_inputs = static_cast<const KeptBackward&>(*kept).call(gradients);
    of_inputs.resize(of_inputs.size() + 2);  // none of the functions
    return of_inputs;
  }
};

}  // namespace

Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, Backward backward) {
  const bool needed = at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const Tensor& input) {
                        return input.defined() && input.requires_grad();
                      });
  return needed ? Node::apply(at::TensorList(inputs), operation, backward) : operation();
}

}  // namespace lockstep::horovod
