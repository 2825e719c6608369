#include "lockstep/parallel/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "gradient/backward_weights.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/context_parallel.h"
#include "ops/replica_random.h"
#include "ops/watching_hook.h"
#include "parallel/exchange.h"
#include "parallel/gradients.h"

namespace lockstep {
namespace {

// The state that a forward uses beside its input: random numbers, precision of operators, and who has other positions.
class ForwardState {
 public:
  explicit ForwardState(c10::Device device)
      : device_(device),
        random_(ops::generator_of_thread().get_state()),
        autocasts_(at::autocast::is_autocast_enabled(device.type())),
        caches_(at::autocast::is_autocast_cache_enabled()),
        dtype_(at::autocast::get_autocast_dtype(device.type())) {
    if (!device.is_cpu()) random_of_device_ = ops::state_of_generator(device);
    if (const auto* const context = ContextParallel::current()) context_.emplace(context->ranks());
  }

  const std::optional<Communicator>& context() const { return context_; }

  void restore() const {
    ops::generator_of_thread().set_state(random_);
    if (random_of_device_.defined()) ops::set_state_of_generator(device_, random_of_device_);
    at::autocast::set_autocast_enabled(device_.type(), autocasts_);
    at::autocast::set_autocast_cache_enabled(caches_);
    at::autocast::set_autocast_dtype(device_.type(), dtype_);
  }

 private:
  c10::Device device_;
  Tensor random_, random_of_device_;
  bool autocasts_, caches_;
  at::ScalarType dtype_;
  std::optional<Communicator> context_;
};

thread_local bool recomputing = false;

// The parts of a module that train: train() and eval() may be called between a forward and its backward.
std::vector<bool> modes_of(const torch::nn::Module& module) {
  std::vector<bool> modes;
  for (const auto& part : module.modules()) modes.push_back(part->is_training());
  return modes;
}

// train() also sets what is in a module, which comes after it.
void set_modes(torch::nn::Module& module, const std::vector<bool>& modes) {
  if (modes == modes_of(module)) return;
  const auto parts = module.modules();
  for (std::size_t i = 0; i < std::min(parts.size(), modes.size()); ++i) parts[i]->train(modes[i]);
}

// A buffer that a module's first forward may change, such as running statistics, and its values before.
struct KeptBuffer {
  Tensor buffer, before;
  std::int64_t version;

  // Not all operators that write tell autograd: native_batch_norm does not.
  bool has_changed() const { return buffer._version() != version || !buffer.equal(before); }
};

std::vector<KeptBuffer> buffers_of(const torch::nn::Module& module) {
  std::vector<KeptBuffer> kept;
  for (const auto& buffer : parallel::unique(module.buffers())) {
    if (buffer.defined()) kept.push_back({buffer, buffer.detach().clone(), buffer._version()});
  }
  return kept;
}

struct Forward : torch::CustomClassHolder {
  std::shared_ptr<torch::nn::Module> module;
  internal::ForwardOfModule function;
  std::optional<ForwardState> state;
  std::vector<bool> modes;
  std::vector<KeptBuffer> changed;

  Tensor operator()(const Tensor& x) const {
    const auto end = c10::make_scope_exit([before = std::exchange(recomputing, true)] { recomputing = before; });
    return function(*module, x);
  }

  // Each parameter once, also where several layers share it, or it is registered twice.
  std::vector<Tensor> parameters() const { return parallel::unique(module->parameters()); }

  // A number that changes with every operator that writes a parameter.
  std::int64_t version_of_parameters() const {
    std::int64_t sum = 0;
    for (const auto& parameter : parameters()) sum += parameter._version();
    return sum;
  }
};

[[noreturn]] void throw_for(const torch::nn::Module& module, const std::string& what) {
  throw InvalidArgument(text("recompute: ", module.name(), what));
}

// Throws where `y` was computed from a leaf of autograd's graph that is not among the inputs: its gradient would be
// lost.
void check_leaves(const torch::nn::Module& module, const Tensor& y, const std::vector<Tensor>& inputs) {
  std::unordered_set<const torch::autograd::Node*> seen;
  for (const auto& input : inputs) seen.insert(torch::autograd::impl::grad_accumulator(input).get());
  std::vector<const torch::autograd::Node*> left{y.grad_fn().get()};
  while (!left.empty()) {
    const auto* const node = left.back();
    left.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      throw_for(module, text("'s forward uses a tensor of shape ", leaf->variable.sizes(),
                             " that requires gradients and is neither its input nor one of its parameters, so that "
                             "its gradient would be lost: register it in the module"));
    }
    for (const auto& edge : node->next_edges()) left.push_back(edge.function.get());
  }
}

// The module's parameters are inputs, so that their gradients come where backward expects them.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Forward>& forward,
                        const Tensor& x, at::TensorList /*parameters*/) {
    forward->state.emplace(x.device());
    forward->modes = modes_of(*forward->module);
    context->saved_data["forward"] = c10::IValue::make_capsule(forward);
    context->saved_data["needs_gradient"] = x.requires_grad();
    context->save_for_backward({x});
    const auto before = x._version();
    forward->changed = buffers_of(*forward->module);
    const auto y = (*forward)(x);
    std::erase_if(forward->changed, [](const KeptBuffer& kept) { return !kept.has_changed(); });
    if (x._version() != before) {
      throw_for(*forward->module,
                " changes its input in place, from which its second forward would compute something else: let it "
                "change a clone, as x = x.clone()");
    }
    context->saved_data["version"] = forward->version_of_parameters();
    return y.is_same(x) ? y.view_as(y) : y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled()) throw InvalidArgument("recompute cannot be differentiated twice");
    const auto forward = c10::static_intrusive_pointer_cast<Forward>(context->saved_data["forward"].toCapsule());
    const bool needs_gradient = context->saved_data["needs_gradient"].toBool();
    if (forward->version_of_parameters() != context->saved_data["version"].toInt()) {
      throw_for(*forward->module,
                "'s parameters have changed since its forward, so that its second forward would compute something "
                "else: change them after the backward");
    }
    // The second forward reads and writes copies of the values that the first one began with.
    std::vector<Tensor> values_now;
    for (const auto& changed : forward->changed) {
      values_now.push_back(changed.buffer.variable_data());
      changed.buffer.set_data(changed.before.clone());
    }
    const auto restore_buffers = c10::make_scope_exit([&] {
      for (std::size_t i = 0; i < values_now.size(); ++i) forward->changed[i].buffer.set_data(values_now[i]);
    });
    auto x = context->get_saved_variables()[0].detach();
    if (needs_gradient) x.requires_grad_();
    Tensor y;
    {
      const at::AutoGradMode with_gradient(true);
      const ForwardState now(x.device());
      forward->state->restore();
      const auto restore_modes = c10::make_scope_exit(
          [&module = *forward->module, modes = modes_of(*forward->module)] { set_modes(module, modes); });
      set_modes(*forward->module, forward->modes);
      std::optional<ContextParallel> in_context;  // in loops the one of the forward may have ended
      if (forward->state->context()) in_context.emplace(*forward->state->context());
      y = (*forward)(x);
      now.restore();
    }
    std::vector<Tensor> inputs;
    if (needs_gradient) inputs.push_back(x);
    const auto parameters = forward->parameters();
    if (!y.requires_grad()) return torch::autograd::variable_list(2 + parameters.size());  // it uses none of them
    for (const auto& parameter : parameters) {
      if (parameter.requires_grad()) inputs.push_back(parameter);
    }
    check_leaves(*forward->module, y, inputs);
    const gradient::BackwardWeights::Inside inside(parameters);
    const ops::WithoutGradientHooks no_hooks(parameters);
    auto found =
        torch::autograd::grad({y}, inputs, {gradients[0]}, /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                              /*allow_unused=*/true);
    torch::autograd::variable_list result{Tensor()};
    auto next = found.begin();
    result.push_back(needs_gradient ? *next++ : Tensor());
    for (const auto& parameter : parameters) result.push_back(parameter.requires_grad() ? *next++ : Tensor());
    return result;
  }
};

}  // namespace

bool parallel::in_recompute() { return recomputing; }

Tensor internal::recompute(const std::shared_ptr<torch::nn::Module>& module, const ForwardOfModule& forward,
                           const Tensor& x) {
  if (!at::GradMode::is_enabled()) return forward(*module, x);
  auto held = c10::make_intrusive<Forward>();
  held->module = module;
  held->function = forward;
  return Recompute::apply(held, x, at::TensorList(held->parameters()));
}

}  // namespace lockstep
