// Converted layers are recognized by their tensors: LibTorch's batch_norm, which all layers call, is replaced by a
// kernel that looks for its tensors among those of converted layers.
#include "lockstep/ddp/sync_batch_norm.h"

#include <ATen/Functions.h>
#include <ATen/ops/batch_norm_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <numeric>

#include "base/text.h"
#include "gradient/backward_weights.h"
#include "gradient/layer_over_ranks.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/group.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr std::chrono::minutes kTimeout(30);

Deadline soon() { return Deadline::after(kTimeout); }

struct Layer : gradient::LayerOverRanks {
  Layer(const std::shared_ptr<torch::nn::Module>& of, const std::string& name, const Tensor& weight_parameter,
        std::shared_ptr<const Group> among)
      : LayerOverRanks(of, name, std::move(among)),
        parameter(weight_parameter.defined() ? weight_parameter.getIntrusivePtr() : nullptr),
        forward(text("the statistics of the batch normalization \"", name, "\"")),
        backward(text("the gradients of the batch normalization \"", name, "\"")) {}

  // The weight of this rank's gradients in the backward that runs.
  double weight_of_backward(double examples) const {
    const auto own = parameter.lock();
    const auto known = gradient::BackwardWeights::of_layer(own ? Tensor(own) : Tensor());
    if (known) return *known;
    const double counts_for = weight().value_or(examples);
    set_counted(counts_for);
    return counts_for;
  }

  const c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> parameter;  // its weight
  const Purpose forward, backward;
};

std::shared_ptr<const Layer> layer_of(const OptionalTensor& tensor) {
  if (!tensor || !tensor->defined()) return nullptr;
  return std::dynamic_pointer_cast<const Layer>(gradient::layer_over_ranks_of(*tensor));
}

// On the device of `values`.
Tensor summed(const Tensor& values, const Group& group, Purpose purpose) {
  const auto sum = values.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous();
  auto call = on_stream_of(sum, Call::all_reduce(buffer_of(sum), ReduceOp::sum));
  call.purpose = purpose;
  group.run(call, soon());
  return sum.to(values.options());
}

struct LayerHolder : torch::CustomClassHolder {
  explicit LayerHolder(std::shared_ptr<const Layer> of) : layer(std::move(of)) {}
  std::shared_ptr<const Layer> layer;
};

// Sums over all ranks. Backward sums the ranks' gradients, each times the rank's weight in the average of the
// parameters' gradients. DistributedDataParallel and fully_shard give the examples of the backward, Horovod gives 1.
// Where nobody is known to average gradients, a rank counts for its examples: those of its whole batch in a pipeline,
// else those of the forward.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& values,
                        const c10::intrusive_ptr<LayerHolder>& holder, double examples) {
    context->saved_data["layer"] = c10::IValue::make_capsule(holder);
    context->saved_data["examples"] = examples;
    return summed(values, holder->layer->group(), holder->layer->forward);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto layer = c10::static_intrusive_pointer_cast<LayerHolder>(context->saved_data["layer"].toCapsule())->layer;
    double weight = 0;
    try {
      weight = layer->weight_of_backward(context->saved_data["examples"].toDouble());
    } catch (const std::exception& error) {  // the others wait for this rank's gradients
      layer->group().abort(text(layer->backward.words(),
                                ": another rank does not know the number of its examples in this backward: rank ",
                                layer->group().rank(), ": ", error.what()));
      throw;
    }
    const auto sum = summed(gradients[0] * weight, layer->group(), layer->backward);
    return {weight > 0 ? sum / weight : at::zeros_like(sum), Tensor(), Tensor()};
  }
};

void update_running(const OptionalTensor& running, const Tensor& now, double momentum) {
  if (!running || !running->defined()) return;
  const at::NoGradGuard no_gradient;
  running->copy_(running->to(now.scalar_type()).mul(1 - momentum).add_(now.detach(), momentum));  // rounded once
}

Tensor normalized_over_ranks(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& running_mean, const OptionalTensor& running_var, double momentum,
                             double eps, std::shared_ptr<const Layer> layer) {
  // Counts and sums need more than 16 bits.
  const auto x = input.scalar_type() == at::kDouble ? input : input.to(at::kFloat);
  const auto holder = c10::make_intrusive<LayerHolder>(std::move(layer));
  const auto examples = static_cast<double>(x.size(0));
  const auto channels = x.size(1);
  std::vector<std::int64_t> others(static_cast<std::size_t>(x.dim()) - 1), shape(static_cast<std::size_t>(x.dim()), 1);
  std::iota(others.begin() + 1, others.end(), 2);
  shape[1] = channels;
  const auto own_values = channels > 0 ? x.numel() / channels : 0;  // per channel
  const auto own_count = at::full({1}, static_cast<double>(own_values), x.options());

  const auto totals = SumOverRanks::apply(at::cat({x.sum(others), own_count}), holder, examples);
  const auto count = totals[channels].detach();
  if (own_values <= 1 && count.item<double>() <= 1) {  // else the host need not wait for a GPU
    throw InvalidArgument("batch normalization over all ranks needs more than one value per channel in training");
  }
  const auto mean = totals.narrow(0, 0, channels) / count;
  const auto centered = x - mean.view(shape);
  const auto variance = SumOverRanks::apply(centered.square().sum(others), holder, examples) / count;
  update_running(running_mean, mean, momentum);
  update_running(running_var, variance * (count / (count - 1)), momentum);
  auto y = centered * (variance + eps).rsqrt().view(shape);
  if (weight && weight->defined()) y = y * weight->view(shape);
  if (bias && bias->defined()) y = y + bias->view(shape);
  return y.to(input.scalar_type());
}

Tensor batch_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training, double momentum,
                  double eps, bool cudnn_enabled) {
  auto layer = training ? layer_of(running_mean) : nullptr;
  if (training && !layer) layer = layer_of(weight);
  if (!layer || !layer->trains()) {
    return at::compositeimplicitautograd::batch_norm(x, weight, bias, running_mean, running_var, training, momentum,
                                                     eps, cudnn_enabled);
  }
  return normalized_over_ranks(x, weight, bias, running_mean, running_var, momentum, eps, std::move(layer));
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("batch_norm", TORCH_FN(batch_norm)); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("batch_norm", TORCH_FN(batch_norm)); }

template <class BatchNorm>
bool convert(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
             const std::shared_ptr<const Group>& group) {
  auto* const layer = module->as<BatchNorm>();
  if (layer == nullptr) return false;
  if (!layer->weight.defined() && !layer->running_mean.defined()) {
    throw InvalidArgument(
        text("convert_sync_batchnorm: the layer \"", name, "\" has neither weights nor running statistics"));
  }
  const auto made = std::make_shared<Layer>(module, name, layer->weight, group);
  if (layer->running_mean.defined()) gradient::add_layer_over_ranks(layer->running_mean, made);
  if (layer->weight.defined()) gradient::add_layer_over_ranks(layer->weight, made);
  return true;
}

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const Group& group) {
  const std::shared_ptr<const Group> own = group.split(0, group.rank(), soon());
  for (const auto& part : module.named_modules()) {
    convert<torch::nn::BatchNorm1dImpl>(part.value(), part.key(), own) ||
        convert<torch::nn::BatchNorm2dImpl>(part.value(), part.key(), own) ||
        convert<torch::nn::BatchNorm3dImpl>(part.value(), part.key(), own) ||
        convert<SyncBatchNormImpl>(part.value(), part.key(), own);
  }
}

void SyncBatchNormImpl::_check_input_dim(const Tensor& x) {
  if (x.dim() >= 2) return;
  throw InvalidArgument(
      text("SyncBatchNorm: the input has shape ", x.sizes(), "; it must be [examples, channels, ...]"));
}

Tensor SyncBatchNormImpl::forward(const Tensor& x) {
  _check_input_dim(x);
  const bool by_batch = is_training() || !options.track_running_stats();
  const bool is_converted = layer_of(running_mean) || layer_of(weight);
  if (by_batch && !(is_converted && is_training()) && x.numel() == x.size(1)) {
    throw InvalidArgument(text("SyncBatchNorm: the input has shape ", x.sizes(),
                               ", one value per channel, and convert_sync_batchnorm gave the layer no other ranks"));
  }
  double momentum = options.momentum().value_or(0);
  if (is_training() && options.track_running_stats()) {
    num_batches_tracked += 1;
    if (!options.momentum()) momentum = 1 / num_batches_tracked.item<double>();  // the mean over all batches
  }
  return at::batch_norm(x, weight, bias, running_mean, running_var, by_batch, momentum, options.eps(), true);
}

}  // namespace lockstep
