#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/process.h"
#include "base/text.h"
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
    lines += text("\"", names[i], "\" ", tensors[i].scalar_type(), " ", tensors[i].sizes(),
                  tensors[i].requires_grad() ? "" : ", which requires no gradient", "\n");
  }
  return lines;
}

// The options in which all ranks must agree, one a line.
std::string describe(const DistributedDataParallelOptions& options) {
  return text("bucket_cap_mb ", options.bucket_cap_mb, "\nfirst_bucket_mb ", options.first_bucket_mb,
              "\nbroadcast_buffers ", options.broadcast_buffers, "\ngradient_dtype ",
              options.gradient_dtype ? name_of(*options.gradient_dtype) : "none", "\nbucket_order ",
              join(options.bucket_order), "\ncomm_hook ", options.comm_hook ? "yes" : "none", "\nweigh_by_examples ",
              options.weigh_by_examples, "\nbatch_dim ", options.batch_dim);
}

DistributedDataParallelOptions checked(DistributedDataParallelOptions options) {
  const auto require_above_zero = [](const char* name, double value) {
    require(value > 0, text("DistributedDataParallel: ", name), value, "above 0");
  };
  require_above_zero("bucket_cap_mb", options.bucket_cap_mb);
  require_above_zero("first_bucket_mb", options.first_bucket_mb);
  require_above_zero("timeout_seconds", options.timeout_seconds.value_or(1));
  return options;
}

}  // namespace

struct DistributedGradients::State {
  void share_values(int root = 0) {
    auto tensors = module->parameters();
    for (const auto& buffer : module->buffers()) tensors.push_back(buffer);
    device_of_values = gradient::device_of_sums(ranks_for_values, tensors);
    broadcast(ranks_for_values, tensors, root, device_of_values);
  }
  void share_buffers(int root) const {
    if (options.broadcast_buffers) broadcast(ranks_for_buffers, module->buffers(), root, device_of_values);
  }

  // Called when the reducer was made, for the ranks that there are.
  void name_purposes() {
    ranks_for_values = ranks.with_purpose(Purpose(text("the values of ", reducer->name())));
    ranks_for_buffers = ranks.with_purpose(Purpose(text("the buffers of ", reducer->name())));
    end_of_join = Purpose(text("the end of join of ", reducer->name()));
  }

  // Throws for a parameter whose gradients would not be reduced. `all`: also for one that the module got after it was
  // wrapped.
  void check_parameters(bool all) const {
    const auto requires_gradient = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
    const bool unfrozen = std::any_of(frozen.begin(), frozen.end(), requires_gradient);
    const bool all_frozen = std::none_of(trained.begin(), trained.end(), requires_gradient);  // no backward would tell
    if (!unfrozen && !all_frozen && !all) return;
    for (const auto& each : module->named_parameters()) {
      const auto& parameter = each.value();
      if (!parameter.requires_grad() || known.count(parameter.unsafeGetTensorImpl()) > 0) continue;
      throw InvalidArgument(
          text("DistributedDataParallel: the parameter \"", each.key(), "\" requires a gradient, which ",
               "it did not, or was not there, when the module was wrapped, and would not be averaged: ",
               "wrap the module anew"));
    }
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
  Communicator ranks_for_values, ranks_for_buffers;  // the same ranks
  at::Device device_of_values = at::kCPU;            // by which they go from rank to rank; for a Group
  Purpose end_of_join = {};
  std::vector<at::Tensor> trained = {}, frozen = {};
  std::set<const at::TensorImpl*> known = {};  // those in `trained`
  std::vector<std::weak_ptr<internal::CollectiveStep>> steps = {};
  bool warned_of_join = false;
};

DistributedGradients::DistributedGradients(std::shared_ptr<torch::nn::Module> module, Communicator ranks,
                                           DistributedDataParallelOptions options)
    : state_(new State{std::move(module),
                       checked(options),
                       options.timeout_seconds ? ranks.with_timeout(*options.timeout_seconds) : ranks,
                       {},
                       {},
                       {}}) {
  state_->ranks_for_values = state_->ranks.with_purpose(Purpose("the first values of DistributedDataParallel"));
  std::vector<std::string> names, trained_names;
  std::vector<at::Tensor> tensors, trained;
  for (const auto& parameter : state_->module->named_parameters()) {
    if (!ops::has_values(parameter.value())) {
      throw InvalidArgument(text("DistributedDataParallel: ", parameter.key(),
                                 " has no values: fully_shard divided it, and averages its gradients itself"));
    }
    names.push_back(parameter.key());
    tensors.push_back(parameter.value());
    if (!parameter.value().requires_grad()) {
      state_->frozen.push_back(parameter.value());
      continue;
    }
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
  for (const auto& parameter : trained) {  // tied ones have several names
    if (state_->known.insert(parameter.unsafeGetTensorImpl()).second) state_->trained.push_back(parameter);
  }
  state_->reducer.emplace(
      trained_names, std::move(trained), state_->ranks,
      gradient::GradientReducerOptions{
          .buckets = {.bucket_bytes = static_cast<std::size_t>(chosen.bucket_cap_mb * kMegabyte),
                      .first_bucket_bytes = static_cast<std::size_t>(chosen.first_bucket_mb * kMegabyte),
                      .gradient_dtype = chosen.gradient_dtype,
                      .order = chosen.bucket_order,
                      .hook = chosen.comm_hook,
                      .idle_cores = state_->ranks.size() < usable_cpu_count(),
                      .called = "DistributedDataParallel"},
          .weights = {.caller = "DistributedDataParallel",
                      .object = "ddp",
                      .weight = chosen.weigh_by_examples ? gradient::BackwardWeights::Weight::by_forwards
                                                         : gradient::BackwardWeights::Weight::as_told,
                      .on_other_parameters = [state = state_.get()] { state->check_parameters(/*all=*/true); }}});
  state_->name_purposes();
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
  auto call = Call::all_reduce(buffer_of(std::span(&source, 1)), ReduceOp::min);
  call.purpose = state_->end_of_join;
  ranks.group().run(call, ranks.deadline());
  state_->share_values(source);
  const bool has_joint_step = std::ranges::any_of(state_->steps, [](const auto& step) { return !step.expired(); });
  if (!last || has_joint_step || std::exchange(state_->warned_of_join, true)) return;
  log_warning(text("DistributedDataParallel::join: rank ", ranks.rank(), " made fewer steps than rank ", source,
                   ", and has its parameters now. The state of this rank's own optimizer has seen fewer steps: with "
                   "momentum, or Adam, the next steps of the ranks would differ. ShardedOptimizer takes part in all "
                   "steps"));
}

void DistributedGradients::add_examples(double examples) {
  if (at::GradMode::is_enabled()) state_->reducer->weights().add(examples);  // forwards of an evaluation do not count
}

void DistributedGradients::prepare() {
  if (!at::GradMode::is_enabled()) return;
  state_->check_parameters(/*all=*/false);
  if (!state_->reducer->prepare()) return;
  state_->name_purposes();
  state_->share_values();
}

internal::RecordedForward DistributedGradients::begin_forward(std::optional<double> examples) {
  prepare();
  return {state_->reducer->weights(), examples};
}

std::vector<std::int64_t> DistributedGradients::bucket_order() const { return state_->reducer->order(); }
const Group& DistributedGradients::group() const { return state_->ranks.group(); }
const Communicator& DistributedGradients::ranks() const { return state_->ranks; }
const std::vector<at::Tensor>& DistributedGradients::trained_parameters() const { return state_->trained; }

void DistributedGradients::join_steps_of(std::weak_ptr<internal::CollectiveStep> step) {
  state_->steps.push_back(std::move(step));
}

}  // namespace lockstep
