#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/nn/module.h>

#include <cstdlib>

#include "base/hash.h"
#include "base/text.h"
#include "cluster/host_share.h"
#include "gradient/gradient_reducer.h"
#include "lockstep/ddp.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr double kMegabyte = 1024 * 1024;

// Rank `root`'s values on all ranks, whatever the dtype and the device.
void share(const Group& group, const std::vector<at::Tensor>& tensors, int root, Deadline deadline) {
  const at::NoGradGuard no_gradient;
  for (auto tensor : tensors) {
    auto host = tensor.to(at::kCPU).contiguous();
    group.broadcast({host.data_ptr(), host.nbytes(), DType::uint8}, root, deadline);
    if (!host.is_same(tensor)) tensor.copy_(host);
  }
}

// Throws on all ranks, naming a parameter, when their modules differ.
void require_same(const Group& group, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                  Deadline deadline) {
  std::vector<std::int64_t> mine{static_cast<std::int64_t>(tensors.size())};
  for (const auto& tensor : tensors) {
    auto hash = mix(static_cast<std::uint64_t>(tensor.scalar_type()));
    for (const auto size : tensor.sizes()) hash = mix(hash, static_cast<std::uint64_t>(size));
    mine.push_back(static_cast<std::int64_t>(hash));
  }
  auto first = mine;
  std::int64_t count = mine[0];
  group.broadcast(buffer_of(std::span(&count, 1)), 0, deadline);
  std::int32_t differs = count == mine[0] ? 0 : 1;  // 1: in number, 2 and more: in parameter differs - 2
  group.all_reduce(buffer_of(std::span(&differs, 1)), ReduceOp::max, deadline);
  if (differs == 0) {
    group.broadcast(buffer_of(std::span(first)), 0, deadline);
    for (std::size_t i = 0; i < tensors.size() && differs == 0; ++i) {
      if (first[i + 1] != mine[i + 1]) differs = static_cast<std::int32_t>(i) + 2;
    }
    group.all_reduce(buffer_of(std::span(&differs, 1)), ReduceOp::max, deadline);
  }
  if (differs == 1) {
    throw InvalidArgument(text("the ranks' modules differ: rank 0 has ", count, " parameters and buffers, rank ",
                               group.rank(), " ", mine[0]));
  }
  if (differs > 1) {
    const auto i = static_cast<std::size_t>(differs) - 2;
    throw InvalidArgument(text("the ranks' modules differ in \"", names[i], "\", which is ", tensors[i].scalar_type(),
                               " ", tensors[i].sizes(), " on rank ", group.rank()));
  }
}

DistributedDataParallelOptions checked(DistributedDataParallelOptions options) {
  const auto require_above_zero = [](const char* name, double value) {
    if (!(value > 0))
      throw InvalidArgument(text("DistributedDataParallel: ", name, " is ", value, "; it must be above 0"));
  };
  require_above_zero("bucket_cap_mb", options.bucket_cap_mb);
  require_above_zero("first_bucket_mb", options.first_bucket_mb);
  require_above_zero("timeout_seconds", options.timeout_seconds);
  return options;
}

}  // namespace

struct DistributedGradients::State {
  Deadline deadline() const { return Deadline::after(std::chrono::duration<double>(options.timeout_seconds)); }

  void share_buffers(int root) const {
    if (options.broadcast_buffers) share(group, module->buffers(), root, deadline());
  }

  const std::shared_ptr<torch::nn::Module> module;
  const Group group;
  const DistributedDataParallelOptions options;
  std::optional<GradientReducer> reducer;
};

DistributedGradients::DistributedGradients(std::shared_ptr<torch::nn::Module> module, Group group,
                                           DistributedDataParallelOptions options)
    : state_(new State{std::move(module), std::move(group), checked(std::move(options)), {}}) {
  std::vector<std::string> names, trained_names;
  std::vector<at::Tensor> tensors, trained;
  for (const auto& parameter : state_->module->named_parameters()) {
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
  require_same(state_->group, names, tensors, state_->deadline());
  share(state_->group, tensors, 0, state_->deadline());
  const auto& chosen = state_->options;
  state_->reducer.emplace(
      std::move(trained_names), std::move(trained), state_->group,
      GradientReducerOptions{static_cast<std::size_t>(chosen.bucket_cap_mb * kMegabyte),
                             static_cast<std::size_t>(chosen.first_bucket_mb * kMegabyte), chosen.gradient_dtype,
                             chosen.timeout_seconds, chosen.bucket_order, chosen.comm_hook});
  if (std::getenv("OMP_NUM_THREADS") == nullptr && kept_cpu_count() < at::get_num_threads()) {
    at::set_num_threads(kept_cpu_count());  // other ranks of this host compute on the other cores
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
  while (const auto root = state_->reducer->shadow_pass()) last = root;
  // A rank that shadowed nothing made the last step; the lowest of those has what all should have.
  std::int32_t source = last ? state_->group.size() : state_->group.rank();
  state_->group.all_reduce(buffer_of(std::span(&source, 1)), ReduceOp::min, state_->deadline());
  std::vector<at::Tensor> tensors = state_->module->parameters();
  for (const auto& buffer : state_->module->buffers()) tensors.push_back(buffer);
  share(state_->group, tensors, source, state_->deadline());
}

void DistributedGradients::add_examples(double examples) {
  if (at::GradMode::is_enabled()) state_->reducer->add_weight(examples);  // not of an evaluation in between
}

void DistributedGradients::prepare() {
  if (at::GradMode::is_enabled()) state_->reducer->require_whole();
}

std::vector<std::int64_t> DistributedGradients::bucket_order() const { return state_->reducer->order(); }
const Group& DistributedGradients::group() const { return state_->group; }

}  // namespace lockstep
