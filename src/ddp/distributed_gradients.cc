#include <ATen/Parallel.h>
#include <torch/nn/module.h>

#include <cstdlib>
#include <set>

#include "base/resources.h"
#include "base/text.h"
#include "cluster/cpu_partition.h"
#include "gradient/gradient_reducer.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/parameter_hook.h"

namespace lockstep {
namespace {

constexpr double kMegabyte = 1024 * 1024;

// A line for each tensor of the module.
std::string describe(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  std::string lines;
  for (std::size_t i = 0; i < names.size(); ++i) {
    lines += text("\"", names[i], "\" ", tensors[i].scalar_type(), " ", tensors[i].sizes(), "\n");
  }
  return lines;
}

// The options in which all ranks must agree, one a line.
std::string describe(const DistributedDataParallelOptions& options) {
  return text("bucket_cap_mb ", options.bucket_cap_mb, "\nfirst_bucket_mb ", options.first_bucket_mb,
              "\nbroadcast_buffers ", options.broadcast_buffers, "\ngradient_dtype ",
              options.gradient_dtype ? name_of(*options.gradient_dtype) : "none", "\nbucket_order ",
              join(options.bucket_order), "\ncomm_hook ", options.comm_hook ? "yes" : "none");
}

DistributedDataParallelOptions checked(DistributedDataParallelOptions options) {
  const auto require_above_zero = [](const char* name, double value) {
    if (!(value > 0))
      throw InvalidArgument(text("DistributedDataParallel: ", name, " is ", value, "; it must be above 0"));
  };
  require_above_zero("bucket_cap_mb", options.bucket_cap_mb);
  require_above_zero("first_bucket_mb", options.first_bucket_mb);
  require_above_zero("timeout_seconds", options.timeout_seconds.value_or(1));
  return options;
}

}  // namespace

struct DistributedGradients::State {
  void share_values(int root = 0) const {
    auto tensors = module->parameters();
    for (const auto& buffer : module->buffers()) tensors.push_back(buffer);
    broadcast(ranks, tensors, root);
  }
  void share_buffers(int root) const {
    if (options.broadcast_buffers) broadcast(ranks, module->buffers(), root);
  }

  // Takes part in the others' next backward, and in the steps that follow it.
  std::optional<int> shadow_step() {
    std::erase_if(steps, [](const auto& step) { return step.expired(); });
    for (const auto& parameter : trained) {
      if (!steps.empty()) parameter.mutable_grad().reset();
    }
    const auto root = reducer->shadow_pass(/*wants_gradients=*/!steps.empty());
    for (const auto& step : steps) {
      if (const auto alive = step.lock(); root && alive) alive->step();
    }
    return root;
  }

  const std::shared_ptr<torch::nn::Module> module;
  const DistributedDataParallelOptions options;
  const Communicator ranks;
  std::optional<gradient::GradientReducer> reducer;
  std::vector<at::Tensor> trained = {};
  std::vector<std::weak_ptr<internal::CollectiveStep>> steps = {};
};

DistributedGradients::DistributedGradients(std::shared_ptr<torch::nn::Module> module, Communicator ranks,
                                           DistributedDataParallelOptions options)
    : state_(new State{std::move(module),
                       checked(options),
                       options.timeout_seconds ? ranks.with_timeout(*options.timeout_seconds) : ranks,
                       {}}) {
  std::vector<std::string> names, trained_names;
  std::vector<at::Tensor> tensors, trained;
  for (const auto& parameter : state_->module->named_parameters()) {
    if (!ops::has_values(parameter.value())) {
      throw InvalidArgument(text("DistributedDataParallel: ", parameter.key(),
                                 " has no values: fully_shard divided it, and averages its gradients itself"));
    }
    names.push_back(parameter.key());
    tensors.push_back(parameter.value());
    if (!parameter.value().requires_grad()) continue;
    trained_names.push_back(parameter.key());
    trained.push_back(parameter.value());
  }
  for (const auto& buffer : state_->module->named_buffers()) {
    names.push_back(buffer.key());
    tensors.push_back(buffer.value());
  }
  state_->ranks.check_all_agree("modules", describe(names, tensors));
  state_->ranks.check_all_agree("DistributedDataParallelOptions", describe(state_->options));
  state_->share_values();
  const auto& chosen = state_->options;
  std::set<const at::TensorImpl*> seen;
  for (const auto& parameter : trained) {  // tied ones have several names
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) state_->trained.push_back(parameter);
  }
  state_->reducer.emplace(
      trained_names, std::move(trained), state_->ranks,
      gradient::GradientReducerOptions{
          .buckets = {.bucket_bytes = static_cast<std::size_t>(chosen.bucket_cap_mb * kMegabyte),
                      .first_bucket_bytes = static_cast<std::size_t>(chosen.first_bucket_mb * kMegabyte),
                      .gradient_dtype = chosen.gradient_dtype,
                      .order = chosen.bucket_order,
                      .hook = chosen.comm_hook,
                      .idle_cores = state_->ranks.size() < usable_cpu_count()}});
  if (std::getenv("OMP_NUM_THREADS") == nullptr && cluster::kept_cpu_count() < at::get_num_threads()) {
    at::set_num_threads(cluster::kept_cpu_count());  // other ranks of this host compute on the other cores
  }
  state_->reducer->set_after_pass([state = state_.get()](int root) { state->share_buffers(root); });
}

DistributedGradients::~DistributedGradients() = default;

DistributedGradients::NoSync::NoSync(DistributedGradients& gradients)
    : gradients_(gradients), before_(gradients.state_->reducer->sync()) {
  gradients_.state_->reducer->set_sync(false);
}

DistributedGradients::NoSync::~NoSync() { gradients_.state_->reducer->set_sync(before_); }

void DistributedGradients::join(const std::function<void()>& loop) {
  loop();
  std::optional<int> last;
  while (const auto root = state_->shadow_step()) last = root;
  // A rank that made no shadow step made the last step itself: all take the values of the lowest of those ranks.
  const auto& ranks = state_->ranks;
  std::int32_t source = last ? ranks.size() : ranks.rank();
  ranks.group().all_reduce(buffer_of(std::span(&source, 1)), ReduceOp::min, ranks.deadline());
  state_->share_values(source);
}

void DistributedGradients::add_examples(double examples) {
  if (at::GradMode::is_enabled()) state_->reducer->add_weight(examples);  // forwards of an evaluation do not count
}

void DistributedGradients::prepare() {
  if (at::GradMode::is_enabled() && state_->reducer->prepare()) state_->share_values();
}

std::vector<std::int64_t> DistributedGradients::bucket_order() const { return state_->reducer->order(); }
const Group& DistributedGradients::group() const { return state_->ranks.group(); }
const Communicator& DistributedGradients::ranks() const { return state_->ranks; }
const std::vector<at::Tensor>& DistributedGradients::trained_parameters() const { return state_->trained; }

void DistributedGradients::join_steps_of(std::weak_ptr<internal::CollectiveStep> step) {
  state_->steps.push_back(std::move(step));
}

}  // namespace lockstep
