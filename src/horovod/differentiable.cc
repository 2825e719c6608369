#include "horovod/operations.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>

namespace lockstep::horovod {
namespace {

// A Backward as a node of the graph holds it.
struct KeptBackward : torch::CustomClassHolder {
  explicit KeptBackward(Backward function) : call(std::move(function)) {}
  const Backward call;
};

struct Node : torch::autograd::Function<Node> {
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList,
                         const std::function<Tensors()>& operation, const Backward& backward) {
    context->saved_data["backward"] = c10::IValue::make_capsule(c10::make_intrusive<KeptBackward>(backward));
    return operation();
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto kept = context->saved_data["backward"].toCapsule();
    Tensors floating;
    std::vector<std::size_t> which;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].is_floating_point()) continue;
      floating.push_back(gradients[i]);
      which.push_back(i);
    }
    const auto given = static_cast<const KeptBackward&>(*kept).call(floating, which);
    Tensors of_inputs(gradients.size() + 2);  // no gradients for integers, nor for the two functions
    for (std::size_t i = 0; i < which.size(); ++i) of_inputs[which[i]] = given[i];
    return of_inputs;
  }
};

}  // namespace

Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, const Backward& backward) {
  const bool needed = at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const Tensor& input) {
                        return input.defined() && input.requires_grad();
                      });
  return needed ? Node::apply(at::TensorList(inputs), operation, backward) : operation();
}

}  // namespace lockstep::horovod
