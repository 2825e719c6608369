#include "lockstep/strategy/strategy.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "strategy/devices.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"

namespace lockstep {

namespace {

thread_local std::shared_ptr<StrategyImpl> innermost;

std::shared_ptr<StrategyImpl> make_strategy(strategy::StrategySettings settings) {
  return std::make_shared<StrategyImpl>(std::move(settings));
}

std::vector<std::string> or_default(std::vector<std::string> devices) {
  return devices.empty() ? strategy::default_devices() : std::move(devices);
}

strategy::StrategySettings settings_of(MirroredOptions options) {
  strategy::StrategySettings settings{.devices = or_default(std::move(options.devices)),
                                      .threads_per_replica = options.threads_per_replica,
                                      .timeouts = {.step = options.timeout_seconds}};
  if (options.cross_device_ops != CrossDeviceOps::automatic) settings.gpu_backend.reset();
  switch (options.cross_device_ops) {
    case CrossDeviceOps::automatic:
    case CrossDeviceOps::one_pass: break;
    case CrossDeviceOps::reduction_to_one_device:
      settings.gradients.exchange = gradient::Exchange::reduction_to_one_device;
      break;
    case CrossDeviceOps::hierarchical_copy_all_reduce:
      settings.gradients.exchange = gradient::Exchange::hierarchical_copy;
      break;
    case CrossDeviceOps::nccl: settings.gpu_backend = "nccl"; break;
  }
  const auto is_cpu = [](const std::string& device) { return device.starts_with("cpu"); };
  if (options.cross_device_ops == CrossDeviceOps::nccl && std::ranges::any_of(settings.devices, is_cpu)) {
    throw InvalidArgument(
        text("cross_device_ops: nccl sums gradients on GPUs, and the strategy's devices are ", join(settings.devices)));
  }
  if (options.reduce_to_device.empty()) return settings;
  const auto found = std::find(settings.devices.begin(), settings.devices.end(), options.reduce_to_device);
  if (found == settings.devices.end()) {
    throw InvalidArgument(text("reduce_to_device is ", options.reduce_to_device, "; the strategy's devices are ",
                               join(settings.devices)));
  }
  settings.gradients.root = static_cast<int>(found - settings.devices.begin());
  return settings;
}

template <class T>
T fold(ReduceOp op, const PerReplica<T>& values, const auto& smaller, const auto& larger) {
  T result = values[0];
  for (int i = 1; i < values.size(); ++i) {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::mean: result = result + values[i]; break;
      case ReduceOp::min: result = smaller(result, values[i]); break;
      case ReduceOp::max: result = larger(result, values[i]); break;
      case ReduceOp::product: result = result * values[i]; break;
    }
  }
  return op == ReduceOp::mean ? result / values.size() : result;
}

// Throws for other shapes: LibTorch would broadcast them, or say in its own words that they do not fit.
void check_equal_shapes(const PerReplica<Tensor>& values) {
  for (int i = 0; i < values.size(); ++i) {
    if (!values[i].defined()) throw InvalidArgument(text("Strategy::reduce: replica ", i, "'s value is undefined"));
    if (values[i].layout() != at::kStrided)
      throw InvalidArgument(text("Strategy::reduce: replica ", i, "'s value is sparse; make it dense first"));
    if (values[i].sizes() == values[0].sizes() && values[i].scalar_type() == values[0].scalar_type()) continue;
    throw InvalidArgument(text("Strategy::reduce: replica 0's value is ", values[0].scalar_type(), " ",
                               values[0].sizes(), ", replica ", i, "'s ", values[i].scalar_type(), " ",
                               values[i].sizes(),
                               "; all must have one shape and dtype. Strategy::gather takes uneven ones"));
  }
}

const Purpose kComparing("comparing the workers' values of reduce or gather"), kReducing("Strategy::reduce"),
    kReducingNumbers("Strategy::reduce of numbers");

// A description of a worker's value, which all workers compare: one message, which needs no text.
struct Brought {
  static constexpr std::int64_t kFailed = -1, kMostSizes = 12;

  std::int64_t op = 0, dtype = 0, dims = kFailed, sizes[kMostSizes] = {};

  // `free_dim`: the dimension along which sizes may differ.
  static Brought of(std::int64_t op, const Tensor& value, std::optional<std::int64_t> free_dim) {
    Brought brought{op, static_cast<std::int64_t>(value.scalar_type()), value.dim()};
    for (std::int64_t i = 0; i < value.dim(); ++i) {
      auto& size = brought.sizes[std::min(i, kMostSizes - 1)];
      size = i < kMostSizes ? value.size(i) : static_cast<std::int64_t>(mix(size, value.size(i)));
      if (free_dim == i) size = -1;
    }
    return brought;
  }

  bool operator==(const Brought&) const = default;

  std::string words() const {
    std::vector<std::string> shown;
    for (std::int64_t i = 0; i < std::min(dims, kMostSizes); ++i)
      shown.push_back(sizes[i] < 0 ? "any" : std::to_string(sizes[i]));
    return text(static_cast<at::ScalarType>(dtype), " [", join(shown), "]");
  }
};

// Returns the result of `make` on this worker. All workers throw where their values do not fit each other, or one
// failed to make its own: so none waits for another.
Tensor value_of_each(const Communicator& workers, const char* caller, std::int64_t op,
                     std::optional<std::int64_t> free_dim, const std::function<Tensor()>& make) {
  if (workers.size() == 1) return make();
  Tensor here;
  Brought mine;
  std::exception_ptr failed;
  try {
    here = make();
    mine = Brought::of(op, here, free_dim ? std::optional(at::maybe_wrap_dim(*free_dim, here.dim())) : std::nullopt);
  } catch (...) {
    failed = std::current_exception();
  }
  std::vector<Brought> all(static_cast<std::size_t>(workers.size()));
  auto call =
      Call::all_gather({&mine, sizeof mine, DType::uint8}, {all.data(), all.size() * sizeof mine, DType::uint8});
  call.purpose = kComparing;
  workers.group().run(call, workers.deadline());
  if (failed) std::rethrow_exception(failed);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].dims == Brought::kFailed)
      throw InvalidArgument(text(caller, ": the values of worker ", i, "'s replicas do not fit each other"));
    if (all[i] == all[0]) continue;
    if (all[i].op != all[0].op) throw InvalidArgument(text(caller, ": worker ", i, " reduces in another way than 0"));
    throw InvalidArgument(
        text(caller, ": worker 0's value is ", all[0].words(), ", worker ", i, "'s ", all[i].words(),
             "; all must have one shape and dtype",
             free_dim ? text(", but for dimension ", *free_dim) : ". Strategy::gather takes uneven ones"));
  }
  return here;
}

}  // namespace

StrategyScope::StrategyScope(std::shared_ptr<StrategyImpl> strategy)
    : before_(std::exchange(innermost, std::move(strategy))) {}
StrategyScope::~StrategyScope() { innermost = std::move(before_); }

Strategy Strategy::current() { return innermost == nullptr ? OneDeviceStrategy() : Strategy(innermost); }
int Strategy::num_replicas_in_sync() const { return impl_->topology().all_replicas(); }
int Strategy::num_local_replicas() const { return impl_->replicas().count(); }
bool Strategy::is_chief() const { return impl_->topology().is_chief(); }
std::vector<std::string> Strategy::devices() const { return impl_->settings().devices; }
bool Strategy::runs_programs() const { return impl_->kind().compiles_steps(); }
std::vector<std::vector<Tensor>> Strategy::run_program(const internal::StepToRun& step) const {
  std::vector<std::vector<Tensor>> results;
  impl_->workers().abort_on_error([&] { results = impl_->kind().run_compiled(*impl_, step); });
  return results;
}
void Strategy::run_on_replicas(const std::function<void(ReplicaContext&)>& function) const { impl_->run(function); }

Tensor Strategy::reduce(ReduceOp op, const PerReplica<Tensor>& values) const {
  const auto& workers = impl_->topology().data;
  const auto here = value_of_each(workers, "Strategy::reduce", static_cast<std::int64_t>(op), {}, [&] {
    check_equal_shapes(values);
    std::vector<Tensor> together;
    for (const auto& value : values) together.push_back(value.to(values[0].device()));
    return fold(
        op, PerReplica<Tensor>(std::move(together)), [](const Tensor& a, const Tensor& b) { return at::minimum(a, b); },
        [](const Tensor& a, const Tensor& b) { return at::maximum(a, b); });
  });
  if (workers.size() == 1) return here;
  const auto result = here.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true).contiguous();
  auto call = Call::all_reduce(buffer_of(result), op);
  call.purpose = kReducing;
  workers.group().run(call, workers.deadline());
  return result.to(here.device());
}

double Strategy::reduce(ReduceOp op, const PerReplica<double>& values) const {
  double result = fold(
      op, values, [](double a, double b) { return std::min(a, b); }, [](double a, double b) { return std::max(a, b); });
  const auto& workers = impl_->topology().data;
  if (workers.size() == 1) return result;
  auto call = Call::all_reduce(buffer_of(std::span(&result, 1)), op);
  call.purpose = kReducingNumbers;
  workers.group().run(call, workers.deadline());
  return result;
}

Tensor Strategy::gather(const PerReplica<Tensor>& values, std::int64_t axis) const {
  const auto& workers = impl_->topology().data;
  const auto here = value_of_each(workers, "Strategy::gather", 0, axis, [&] {
    std::vector<Tensor> parts;
    for (const auto& value : values) parts.push_back(value.to(values[0].device()));
    return at::cat(parts, axis);
  });
  return workers.size() == 1 ? here : all_gather(workers.group(), here, workers.deadline(), axis);
}

DistributedDataset Strategy::distribute(const Dataset& dataset) const {
  return strategy::distribute(dataset, impl_->local_replicas());
}

DistributedDataset Strategy::distribute_from_function(
    const std::function<Dataset(const InputContext&)>& function) const {
  return {function({.num_input_pipelines = impl_->topology().data.size(),
                    .input_pipeline_id = impl_->topology().data.rank(),
                    .num_replicas_in_sync = num_replicas_in_sync()}),
          Distribution::one_each, impl_->local_replicas()};
}

ReplicatedOptimizer Strategy::optimizer(const Optimizer& optimizer, const ReplicatedModule& module) const {
  auto gradients = impl_->make_gradient_path(optimizer, internal::Unwrap::pointer(module));
  gradients->prepare();
  return impl_->settings().kind->optimizer_of_loop(impl_, gradients);
}

void internal::check_elements(int elements, int replicas) {
  if (elements == replicas) return;
  throw InvalidArgument(text("run: an argument has one element for each of ", elements, " replicas; this strategy has ",
                             replicas, ": it belongs to another strategy"));
}

std::shared_ptr<ReplicatedParameters> internal::replicate_modules(StrategyImpl& strategy, const MakeModule& make) {
  return strategy::replicate_modules(strategy, next_random_seed(), make);
}

std::shared_ptr<ReplicatedParameters> strategy::replicate_modules(StrategyImpl& strategy, std::uint64_t seed,
                                                                  const internal::MakeModule& make) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  strategy.workers().check_on_all([&] {
    for (int replica = 0; replica < strategy.replicas().count(); ++replica) {
      ops::ReplicaRandom random;
      random.seed(seed);
      const ops::ReplicaRandom::Use use(random);
      modules.push_back(make());
      if (modules.back() == nullptr) throw InvalidArgument("the model's factory returned no module");
      modules.back()->to(strategy.replicas().device(replica));
    }
  });
  return strategy.kind().replicate(strategy, modules);
}

std::int64_t InputContext::get_per_replica_batch_size(std::int64_t global_batch_size) const {
  if (global_batch_size < 1 || global_batch_size % num_replicas_in_sync != 0) {
    throw InvalidArgument(text("the global batch size ", global_batch_size, " cannot be divided among ",
                               num_replicas_in_sync, " replicas"));
  }
  return global_batch_size / num_replicas_in_sync;
}

OneDeviceStrategy::OneDeviceStrategy(const std::string& device, int threads)
    : Strategy(make_strategy(
          {.devices = {device.empty() ? strategy::default_device() : device}, .threads_per_replica = threads})) {}

MirroredStrategy::MirroredStrategy(MirroredOptions options)
    : Strategy(make_strategy(settings_of(std::move(options)))) {}
MirroredStrategy::MirroredStrategy(int num_replicas)
    : MirroredStrategy(MirroredOptions{.devices = strategy::logical_cpus(num_replicas)}) {}

CentralStorageStrategy::CentralStorageStrategy(CentralStorageOptions options)
    : Strategy(make_strategy({.devices = or_default(std::move(options.compute_devices)),
                              .threads_per_replica = options.threads_per_replica,
                              .placement = gradient::Placement::central,
                              .timeouts = {.step = options.timeout_seconds}})) {}

// The calls of step functions: exchange of tensors between replicas, and their random numbers.
int ReplicaContext::replica_id() const { return strategy_.topology().first_replica() + local_replica_id(); }

int ReplicaContext::local_replica_id() const {
  if (ops::current_trace() == nullptr) return local_replica_id_;
  throw InvalidArgument(
      "replica_id: a step that is compiled is one program for all replicas; give each its own data instead");
}

int ReplicaContext::num_replicas_in_sync() const { return strategy_.topology().all_replicas(); }
const Group& ReplicaContext::group() const { return strategy_.replicas().group(local_replica_id_); }
const Group& ReplicaContext::local_group() const { return strategy_.replicas().local_group(local_replica_id_); }
Deadline ReplicaContext::deadline() const { return strategy_.deadline(); }

const std::string& ReplicaContext::device() const {
  return strategy_.settings().devices[static_cast<std::size_t>(local_replica_id_)];
}

void ReplicaContext::seed_random(std::uint64_t seed) const {
  if (ops::current_trace() != nullptr)
    throw InvalidArgument("seed_random: a step that is compiled has random numbers of its own in each run");
  strategy_.replicas().random(local_replica_id_).seed(seed);
}

Tensor ReplicaContext::all_reduce(ReduceOp op, const Tensor& value) const {
  if (auto* const trace = ops::current_trace()) return trace->all_reduce(op, {value})[0];
  const auto result = value.detach().clone(at::MemoryFormat::Contiguous);
  lockstep::all_reduce(group(), result, op, deadline());
  return result;
}

Tensor ReplicaContext::all_gather(const Tensor& value, std::int64_t axis) const {
  if (auto* const trace = ops::current_trace()) return trace->all_gather(value, axis);
  return lockstep::all_gather(group(), value, deadline(), axis);
}

}  // namespace lockstep
