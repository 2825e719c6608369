#include "gradient/device_update.h"

#include <ATen/ATen.h>

#include <map>

#include "base/mutex.h"
#include "base/text.h"
#include "gradient/updater.h"
#include "lockstep/base/error.h"
#include "optimizer/rules.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

void update(const SGDOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto step = at::_foreach_mul(p.gradients, rate);
  if (options.momentum == 0) {
    at::_foreach_sub_(p.values, step);
    return;
  }
  const auto& velocity = p.states[0];
  at::_foreach_mul_(velocity, options.momentum);
  at::_foreach_sub_(velocity, step);
  if (options.nesterov) {
    at::_foreach_add_(p.values, velocity, options.momentum);
    at::_foreach_sub_(p.values, step);
  } else {
    at::_foreach_add_(p.values, velocity);
  }
}

// `rate` includes the correction for means that began at zero.
void update(const AdamOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto &mean = p.states[0], &square = p.states[1];
  at::_foreach_mul_(mean, options.beta_1);
  at::_foreach_add_(mean, p.gradients, 1 - options.beta_1);
  at::_foreach_mul_(square, options.beta_2);
  at::_foreach_addcmul_(square, p.gradients, p.gradients, 1 - options.beta_2);
  if (options.amsgrad) at::_foreach_maximum_(p.states[2], square);
  auto denominator = at::_foreach_sqrt(options.amsgrad ? p.states[2] : square);
  at::_foreach_add_(denominator, options.epsilon);
  at::_foreach_sub_(p.values, at::_foreach_div(at::_foreach_mul(mean, rate), denominator));
}

// On a GPU in one kernel. LibTorch adds epsilon after the bias correction, Keras before: so `rate` includes the
// correction, and with `far_step` as the step LibTorch's own correction is 1.
void update_fused(const AdamOptions& options, const DeviceParameters& p, const at::Tensor& rate,
                  const at::Tensor& far_step) {
  const Tensors steps(p.values.size(), far_step);
  const auto fused = [&](const auto& learning_rate) {
    at::_fused_adam_(p.values, p.gradients, p.states[0], p.states[1], options.amsgrad ? p.states[2] : Tensors(), steps,
                     learning_rate, options.beta_1, options.beta_2, /*weight_decay=*/0, options.epsilon,
                     options.amsgrad, /*maximize=*/false);
  };
  if (rate.scalar_type() == at::kFloat) return fused(rate);
  fused(rate.item<double>());  // the kernel takes no float64 rate from the device
}

void update(const RMSpropOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto& square = p.states[0];
  at::_foreach_mul_(square, options.rho);
  at::_foreach_addcmul_(square, p.gradients, p.gradients, 1 - options.rho);
  auto denominator = at::_foreach_add(square, options.epsilon);
  if (options.centered) {
    const auto& mean = p.states[1];
    at::_foreach_mul_(mean, options.rho);
    at::_foreach_add_(mean, p.gradients, 1 - options.rho);
    at::_foreach_addcmul_(denominator, mean, mean, -1);
  }
  at::_foreach_sqrt_(denominator);
  const auto step = at::_foreach_div(at::_foreach_mul(p.gradients, rate), denominator);
  if (options.momentum > 0) {
    const auto& velocity = p.states.back();
    at::_foreach_mul_(velocity, options.momentum);
    at::_foreach_add_(velocity, step);
    at::_foreach_sub_(p.values, velocity);
  } else {
    at::_foreach_sub_(p.values, step);
  }
}

void update(const AdagradOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto& accumulator = p.states[0];
  at::_foreach_addcmul_(accumulator, p.gradients, p.gradients);
  auto denominator = at::_foreach_add(accumulator, options.epsilon);
  at::_foreach_sqrt_(denominator);
  at::_foreach_sub_(p.values, at::_foreach_div(at::_foreach_mul(p.gradients, rate), denominator));
}

// Rules that need the learning rate alone.
template <class Options>
class RateRule final : public DeviceRule {
 public:
  explicit RateRule(Options options) : options_(std::move(options)) {}
  std::vector<double> numbers(const UpdateStep& step) const override { return {step.learning_rate}; }
  void update(const DeviceParameters& parameters, const Tensors& numbers) override {
    lockstep::update(options_, parameters, numbers[0]);
  }

 private:
  const Options options_;
};

class AdamOnDevice final : public DeviceRule {
 public:
  AdamOnDevice(const optimizer::AdamRule& rule, const at::TensorOptions& where) : rule_(rule) {
    if (where.device().is_cuda()) far_step_ = at::full({}, 3e38, where.dtype(at::kFloat));
  }
  std::vector<double> numbers(const UpdateStep& step) const override { return {rule_.rate(step)}; }
  void update(const DeviceParameters& parameters, const Tensors& numbers) override {
    if (far_step_.defined()) return update_fused(rule_.options(), parameters, numbers[0], far_step_);
    lockstep::update(rule_.options(), parameters, numbers[0]);
  }

 private:
  const optimizer::AdamRule& rule_;
  at::Tensor far_step_;  // of a GPU, a scalar: a step so late that LibTorch corrects nothing
};

// Updates spans in host memory.
class OnHost final : public DeviceRule {
 public:
  explicit OnHost(const UpdateRule& rule) : rule_(rule) {}
  std::vector<double> numbers(const UpdateStep& step) const override {
    return {static_cast<double>(step.iteration), step.learning_rate};
  }
  void update(const DeviceParameters& parameters, const Tensors& numbers) override {
    if (numbers[0].is_privateuseone()) {
      throw InvalidArgument(text("the optimizer's rule \"", rule_.name(),
                                 "\" is not built in, so that it has an update for host memory alone: register one for "
                                 "devices (register_device_rule)"));
    }
    step_ = {numbers[0].item<std::int64_t>(), numbers[1].item<double>()};
    for (std::size_t i = 0; i < parameters.values.size(); ++i) {
      if (parameters.values[i].scalar_type() == at::kDouble) {
        update_one<double>(parameters, i);
      } else {
        update_one<float>(parameters, i);
      }
    }
  }

 private:
  template <class T>
  void update_one(const DeviceParameters& parameters, std::size_t i) const {
    const auto value = parameters.values[i].cpu().contiguous(), gradient = parameters.gradients[i].cpu().contiguous();
    Tensors state;
    std::vector<T*> pointers;
    for (const auto& tensors : parameters.states) {
      state.push_back(tensors[i].cpu().contiguous());
      pointers.push_back(state.back().template mutable_data_ptr<T>());
    }
    const auto count = static_cast<std::size_t>(value.numel());
    rule_.update(step_, std::span(value.template mutable_data_ptr<T>(), count),
                 std::span(gradient.template const_data_ptr<T>(), count), pointers);
    parameters.values[i].copy_(value);
    for (std::size_t k = 0; k < state.size(); ++k) parameters.states[k][i].copy_(state[k]);
  }

  const UpdateRule& rule_;
  UpdateStep step_;
};

template <class Rule>
std::pair<const std::type_index, MakeDeviceRule> built_in() {
  return {typeid(Rule), [](const UpdateRule& rule, const at::TensorOptions&) -> std::unique_ptr<DeviceRule> {
            const auto& options = static_cast<const Rule&>(rule).options();
            return std::make_unique<RateRule<std::decay_t<decltype(options)>>>(options);
          }};
}

struct Registry {
  Mutex mutex;
  std::map<std::type_index, MakeDeviceRule> rules LOCKSTEP_GUARDED_BY(mutex) = {
      built_in<optimizer::SGDRule>(),
      built_in<optimizer::RMSpropRule>(),
      built_in<optimizer::AdagradRule>(),
      {typeid(optimizer::AdamRule),
       [](const UpdateRule& rule, const at::TensorOptions& where) -> std::unique_ptr<DeviceRule> {
         return std::make_unique<AdamOnDevice>(static_cast<const optimizer::AdamRule&>(rule), where);
       }}};
};

Registry& registry() {
  static Registry all;
  return all;
}

// The device rule that was registered for the rule's type, or the built-in one; for other types, one that computes in
// host memory. `rule` must outlive it.
std::unique_ptr<DeviceRule> make_device_rule(const UpdateRule& rule, const at::TensorOptions& options) {
  MakeDeviceRule make;
  {
    MutexLock lock(registry().mutex);
    const auto found = registry().rules.find(typeid(rule));
    if (found != registry().rules.end()) make = found->second;
  }
  return make ? make(rule, options) : std::make_unique<OnHost>(rule);
}

}  // namespace

void register_device_rule(std::type_index rule, MakeDeviceRule make) {
  MutexLock lock(registry().mutex);
  registry().rules.insert_or_assign(rule, std::move(make));
}

}  // namespace lockstep

namespace lockstep::gradient {

DeviceUpdate::DeviceUpdate(const Optimizer& optimizer, const at::TensorOptions& options)
    : optimizer_(optimizer), rule_(make_device_rule(optimizer_.rule(), options)) {}

std::vector<double> DeviceUpdate::numbers(const UpdateStep& step) const {
  auto numbers = rule_->numbers(step);
  if (decay() != 0) numbers.insert(numbers.begin(), 1 - step.learning_rate * decay());
  return numbers;
}

void DeviceUpdate::apply(const DeviceParameters& parameters, const std::vector<at::Tensor>& numbers) const {
  const at::NoGradGuard no_grad;
  auto of_rule = numbers.begin();
  if (decay() != 0) at::_foreach_mul_(parameters.values, *of_rule++);
  rule_->update(parameters, {of_rule, numbers.end()});
}

std::vector<at::Tensor> DeviceUpdate::scaled(const std::vector<at::Tensor>& gradients, double divide_by) const {
  auto result = divide_by == 1 ? gradients : at::_foreach_mul(gradients, 1 / divide_by);
  if (const auto& bound = optimizer_.options().clipvalue) {
    result = at::_foreach_clamp_max(result, *bound);
    at::_foreach_clamp_min_(result, -*bound);
  }
  return result;
}

at::Tensor clip_factors(const Optimizer& optimizer, const at::Tensor& norms) {
  const auto& options = optimizer.options();
  const auto norm = options.global_clipnorm ? at::linalg_vector_norm(norms).expand_as(norms) : norms;
  const double bound = options.clipnorm ? *options.clipnorm : *options.global_clipnorm;
  return bound / norm.clamp_min(bound);
}

namespace {

// Gives `tensor` its old value where `updates` is false: a step without weight changes nothing.
void keep_unless(const at::Tensor& updates, const at::Tensor& tensor, const at::Tensor& old) {
  tensor.copy_(at::where(updates, tensor, old));
}

}  // namespace

TracedUpdate::TracedUpdate(ReplicatedParameters& parameters, Updater& updater, ops::ProgramDevices& devices)
    : parameters_(parameters), updater_(updater) {
  if (updater.loss_scale().used()) {
    throw InvalidArgument(
        "a LossScaleOptimizer is for float16; a TPU computes in bfloat16, whose gradients need no scale: use the "
        "optimizer by itself");
  }
  const auto count = updater.optimizer().rule().states().size();
  std::vector<ops::ProgramDevices::Tensors> hosts;
  for (std::size_t slot = 0; slot < parameters.slots().size(); ++slot) {
    first_state_.push_back(hosts.size());
    for (std::size_t k = 0; parameters.slots()[slot].trainable && k < count; ++k)
      hosts.push_back({updater.state(slot, k)});
  }
  states_ = devices.variables(std::move(hosts));
}

void TracedUpdate::apply(ops::StepTrace& trace, const at::Tensor& weight, bool divides) {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> slots;
  std::vector<at::Tensor> gradients{weight};
  for (std::size_t slot = 0; slot < first_state_.size(); ++slot) {
    if (!parameters_.slots()[slot].trainable) continue;
    auto& host = parameters_.parameter(0, slot);
    const auto gradient = std::exchange(host.mutable_grad(), {});
    if (!gradient.defined()) continue;
    trace.value_of(parameters_.variable(slot)).mutable_grad().reset();  // another backward begins anew
    slots.push_back(slot);
    gradients.push_back(gradient);
  }
  const auto sums = trace.all_reduce(ReduceOp::sum, gradients);
  std::map<std::size_t, at::Tensor> by_slot;
  for (std::size_t i = 0; i < slots.size(); ++i) by_slot[slots[i]] = sums[i + 1];
  const auto number = trace.number_of_update(this);
  for (const auto dtype : {at::kFloat, at::kDouble}) update(trace, sums[0], divides, dtype, by_slot, number);
  trace.after_update([alive = std::weak_ptr(alive_)] {
    if (const auto updater = alive.lock()) (*updater)->count_step();
  });
}

void TracedUpdate::update(ops::StepTrace& trace, const at::Tensor& total_weight, bool divides, at::ScalarType dtype,
                          const std::map<std::size_t, at::Tensor>& sums, std::int64_t number) const {
  DeviceParameters all;
  all.states.resize(updater_.optimizer().rule().states().size());
  for (const auto& [slot, sum] : sums) {
    if (parameters_.slots()[slot].dtype != dtype) continue;
    all.gradients.push_back(divides ? sum / total_weight.to(dtype) : sum);
    all.values.push_back(trace.value_of(parameters_.variable(slot)).detach());
    for (std::size_t k = 0; k < all.states.size(); ++k)
      all.states[k].push_back(trace.value_of((*states_)[first_state_[slot] + k]));
  }
  if (all.values.empty()) return;

  const DeviceUpdate rule(updater_.optimizer(), all.values[0].options());
  std::vector<at::Tensor> numbers;
  for (std::size_t i = 0; i < rule.numbers(updater_.step_after(0)).size(); ++i) {
    numbers.push_back(trace.number(
        dtype, [alive = std::weak_ptr(alive_), number, i,
                of_host = std::make_shared<DeviceUpdate>(updater_.optimizer(), at::TensorOptions(dtype))](auto ahead) {
          const auto updater = alive.lock();
          if (!updater) throw InvalidArgument("a compiled step runs whose optimizer is gone");
          return of_host->numbers((*updater)->step_after(ahead + number))[i];
        }));
  }
  std::vector<at::Tensor> changed = all.values, old;
  for (const auto& states : all.states) changed.insert(changed.end(), states.begin(), states.end());
  for (const auto& tensor : changed) old.push_back(tensor.clone());
  all.gradients = rule.scaled(all.gradients, 1);
  if (clips_by_norm(updater_.optimizer())) {
    const auto factors = clip_factors(updater_.optimizer(), at::stack(at::_foreach_norm(all.gradients)));
    for (std::size_t i = 0; i < all.gradients.size(); ++i)
      all.gradients[i] = all.gradients[i] * factors[static_cast<std::int64_t>(i)];
  }
  rule.apply(all, numbers);
  const auto updates = total_weight > 0;
  for (std::size_t i = 0; i < changed.size(); ++i) keep_unless(updates, changed[i], old[i]);
}

void TracedUpdate::fetch(Deadline deadline) const { states_->fetch(deadline); }

}  // namespace lockstep::gradient
