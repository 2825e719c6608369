#include "lockstep/parallel/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <unordered_set>

#include "base/text.h"
#include "gradient/layer_over_ranks.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/divided_parameter.h"
#include "parallel/flat_shard.h"
#include "parallel/gradients.h"
#include "parallel/tied_parameters.h"

namespace lockstep::parallel {
namespace {

const Purpose kThere("finding which gradients the ranks have"), kSums("the gradients that the ranks share");

// Makes the parameter's gradient dense and contiguous: zeros where there is none.
Tensor& dense_gradient(const Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  if (!gradient.defined()) return gradient = at::zeros_like(parameter, at::MemoryFormat::Contiguous);
  return gradient = (gradient.is_sparse() ? gradient.to_dense() : gradient).contiguous();
}

void require_one_gpu(const std::vector<Tensor>& gradients) {
  const Tensor* first = nullptr;
  for (const auto& gradient : gradients) {
    if (!gradient.is_cuda()) continue;
    if (first != nullptr && gradient.device() != first->device()) {
      throw InvalidArgument(text("a rank's parameters are on ", first->device().str(), " and on ",
                                 gradient.device().str(), "; gradients are summed on one GPU of each rank"));
    }
    first = &gradient;
  }
}

// Replaces each gradient, which is contiguous, by the sum over the ranks. Those on one device are sent together.
void sum_over(const Communicator& ranks, const std::vector<Tensor>& gradients, const Purpose& purpose) {
  require_one_gpu(gradients);
  std::map<c10::DeviceType, std::vector<Call>> calls;
  for (const auto& gradient : gradients) {
    auto call = on_stream_of(gradient, Call::all_reduce(buffer_of(gradient), ReduceOp::sum));
    call.purpose = purpose;
    calls[gradient.device().type()].push_back(std::move(call));
  }
  for (const auto& [device, together] : calls) ranks.group().run(together, ranks.deadline());
}

// The GPU on which this rank's gradients are summed, if it has any on GPUs.
std::optional<at::Device> gpu_of(const std::vector<Tensor>& parameters) {
  const auto found = std::ranges::find_if(parameters, [](const Tensor& parameter) { return parameter.is_cuda(); });
  return found == parameters.end() ? std::nullopt : std::optional(found->device());
}

// `on_gpus`: the number of ranks that have the parameter on their GPU. The others would wait for calls on other
// devices.
void check_on_gpus_alike(const Tensor& parameter, double on_gpus, const Communicator& ranks) {
  if (on_gpus == 0 || on_gpus == ranks.size()) return;
  throw InvalidArgument(text("a parameter of shape ", parameter.sizes(), " is on a GPU on ", on_gpus, " of ",
                             ranks.size(), " ranks; it must be so on all of them, or on none"));
}

using NumbersByDevice = std::map<c10::DeviceIndex, std::vector<Tensor>>;

// The host waits for each device once.
double sum_of_squares(const NumbersByDevice& numbers) {
  double sum = 0;
  for (const auto& [device, of_device] : numbers) sum += at::stack(of_device).square().sum().item<double>();
  return sum;
}

}  // namespace

bool is_divided_among(const Tensor& parameter, const Communicator& ranks) {
  const auto own = partial_of(parameter), partial = own != nullptr ? own : partial_of_shard(parameter);
  return partial != nullptr && partial->ranks().group().shared_backend() == ranks.group().shared_backend();
}

void sum_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks) {
  if (ranks.size() == 1) return;
  const at::NoGradGuard no_gradient;
  const auto gpu = gpu_of(parameters);
  std::vector<Tensor> shared;
  std::vector<double> there;
  for (const auto& parameter : unique(parameters)) {
    if (!parameter.requires_grad() || is_divided_among(parameter, ranks)) continue;
    shared.push_back(parameter);
    there.insert(there.end(), {parameter.grad().defined() ? 1.0 : 0.0, parameter.device() == gpu ? 1.0 : 0.0});
  }
  ranks.with_purpose(kThere).sum(there);
  std::vector<Tensor> gradients;
  for (std::size_t i = 0; i < shared.size(); ++i) {
    check_on_gpus_alike(shared[i], there[2 * i + 1], ranks);
    if (there[2 * i] > 0) gradients.push_back(dense_gradient(shared[i]));
  }
  sum_over(ranks, gradients, kSums);
}

double norm_of(const std::vector<std::pair<Tensor, Tensor>>& gradients, const Communicator& shards,
               const Communicator& stages) {
  struct Parts {
    Communicator ranks = {};  // that hold the other parts
    NumbersByDevice norms = {};
  };
  std::vector<Parts> all(1);  // the first for parameters that are not divided
  for (const auto& [parameter, gradient] : gradients) {
    if (is_tied_copy(parameter)) continue;
    auto* parts = all.data();
    if (const auto partial = partial_of(parameter)) {
      const auto found = std::find_if(all.begin() + 1, all.end(), [&](const auto& each) {
        return each.ranks.group().shared_backend() == partial->ranks().group().shared_backend();
      });
      parts = found != all.end() ? &*found : &all.emplace_back(Parts{partial->ranks()});
    }
    if (!gradient.defined()) continue;
    parts->norms[gradient.device().index()].push_back(gradient.norm(2, at::kDouble));
  }
  std::vector<double> squares;
  for (const auto& parts : all) squares.push_back(sum_of_squares(parts.norms));
  shards.sum(squares);
  double sum = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].ranks.sum({&squares[i], 1});
    sum += squares[i];
  }
  stages.sum({&sum, 1});
  return std::sqrt(sum);
}

std::vector<Tensor> unique(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> each;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) each.push_back(parameter);
  }
  return each;
}

double clip_factor(double norm, double max_norm) {
  const auto factor = max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
  return factor > 1 ? 1 : factor;                // a norm that is no number stays one
}

void check_max_norm(double max_norm) {
  if (!(max_norm > 0)) throw InvalidArgument(text("clip_grad_norm: max_norm is ", max_norm, "; it must be above 0"));
}

}  // namespace lockstep::parallel

namespace lockstep {
namespace {

const Purpose kCounts("the examples of average_gradients"), kMeans("the gradients of average_gradients");

void check_equal(double examples_times_ranks, double total) {
  if (examples_times_ranks == total) return;
  throw InvalidArgument(
      "average_gradients: parameters are divided among ranks whose numbers of examples differ: their "
      "gradients are sums over all ranks already, so scale the losses by the examples instead");
}

// Batch normalizations over equally many ranks, whose last backward must have weighed these ranks as the mean does.
std::vector<std::shared_ptr<gradient::LayerOverRanks>> weighed_layers(const std::vector<Tensor>& parameters,
                                                                      const Communicator& ranks) {
  std::vector<std::shared_ptr<gradient::LayerOverRanks>> layers;
  for (const auto& parameter : parameters) {
    auto layer = gradient::layer_over_ranks_of(parameter);
    if (layer != nullptr && layer->group().size() == ranks.size() && layer->trains() && layer->counted())
      layers.push_back(std::move(layer));
  }
  return layers;
}

// Compares by the equality case of Cauchy's inequality, so that all ranks decide alike. A rank whose batch had no
// examples has no gradient to weigh.
void add_products(double examples, double counted, std::vector<double>& sums) {
  const double mine = counted > 0 ? examples : 0;
  sums.insert(sums.end(), {mine * mine, mine * counted, counted * counted});
}

void check_proportional(const gradient::LayerOverRanks& layer, double examples, std::span<const double> products) {
  constexpr double kRounding = 1e-9;
  const double square = products[1] * products[1], most = products[0] * products[2];
  if (most - square <= kRounding * most) return;
  throw InvalidArgument(
      text("average_gradients: the ranks count for other numbers than in the backward of the batch "
           "normalization \"",
           layer.name(), "\" over them: here this rank counts for ", examples, ", and there for ",
           layer.counted().value_or(0),
           ". Let each rank's loss be the mean over its examples, and give their number; or give "
           "a Pipeline's step the same weight on all ranks, and none here"));
}

}  // namespace

void average_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks, double examples) {
  if (parallel::any_is_shard_of(parameters, ranks))
    throw InvalidArgument(
        "average_gradients: gradients of fully_shard's parameters are means over these ranks already");
  if (ranks.size() == 1) return;
  if (!(examples >= 0)) throw InvalidArgument(text("average_gradients: examples is ", examples));
  const at::NoGradGuard no_gradient;
  std::vector<Tensor> averaged;
  for (const auto& parameter : parallel::unique(parameters)) {
    if (parameter.requires_grad()) averaged.push_back(parameter);
  }
  // The examples, and for each parameter how many ranks have its gradient, and how many have it on a GPU.
  std::vector<double> counts{examples};
  const auto gpu = parallel::gpu_of(averaged);
  for (const auto& parameter : averaged)
    counts.insert(counts.end(), {parameter.grad().defined() ? 1.0 : 0.0, parameter.device() == gpu ? 1.0 : 0.0});
  const auto layers = weighed_layers(averaged, ranks);
  for (const auto& layer : layers) add_products(examples, layer->counted().value_or(0), counts);
  ranks.with_purpose(kCounts).sum(counts);
  const double total = counts[0];
  for (std::size_t i = 0; i < layers.size(); ++i)
    check_proportional(*layers[i], examples, std::span(counts).subspan(2 * averaged.size() + 1 + 3 * i, 3));
  std::vector<Tensor> gradients;
  for (std::size_t i = 0; i < averaged.size(); ++i) {
    const auto& parameter = averaged[i];
    if (parallel::is_divided_among(parameter, ranks)) {
      check_equal(examples * ranks.size(), total);
      if (parameter.grad().defined()) parallel::dense_gradient(parameter).mul_(1.0 / ranks.size());
      continue;
    }
    parallel::check_on_gpus_alike(parameter, counts[2 * i + 2], ranks);
    if (counts[2 * i + 1] == 0) continue;
    auto& gradient = parallel::dense_gradient(parameter);
    if (examples == 0) {
      gradient.zero_();  // the mean over no examples is no number
    } else {
      gradient.mul_(examples / total);
    }
    gradients.push_back(gradient);
  }
  parallel::sum_over(ranks, gradients, kMeans);
}

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm, const Communicator& stages) {
  parallel::check_max_norm(max_norm);
  if (parallel::any_is_shard(parameters))
    throw InvalidArgument("clip_grad_norm: use FullyShardedParameters::clip_grad_norm for its parameters");
  const at::NoGradGuard no_gradient;
  const auto unique = parallel::unique(parameters);
  std::vector<std::pair<Tensor, Tensor>> gradients;
  for (const auto& parameter : unique) gradients.emplace_back(parameter, parameter.grad());
  const auto norm = parallel::norm_of(gradients, {}, stages);
  const auto factor = parallel::clip_factor(norm, max_norm);
  for (const auto& parameter : unique) {
    if (factor != 1 && parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  }
  return norm;
}

}  // namespace lockstep
