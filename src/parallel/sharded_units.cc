#include "parallel/sharded_units.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "gradient/layer_over_ranks.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"
#include "parallel/divided_parameter.h"
#include "parallel/flat_shard.h"
#include "parallel/mesh_backend.h"
#include "parallel/split_linear.h"

namespace lockstep::parallel {
namespace {

// Has a unit gathered when an operator reads one of its parameters.
class UseUnit final : public ops::ParameterHook {
 public:
  UseUnit(std::weak_ptr<ShardedUnits> units, std::size_t unit) : units_(std::move(units)), unit_(unit) {}

  void before(const ops::OperatorCall& call, std::size_t i) override {
    if (call.is_set_data() || call.is_set_storage())
      throw Error("fully_shard: load a module, and move it to a device or another dtype, before it is divided");
    if (!call.reads()) return;
    const auto units = units_.lock();
    if (units == nullptr) throw Error("the module's parameters have no values: what fully_shard returned is gone");
    if (call.writes(i)) {
      throw Error(text(call.name(),
                       " would change a parameter that fully_shard divided: call it before, change the "
                       "shards, or use FullyShardedParameters::load"));
    }
    units->use(unit_, call.number());
  }

 private:
  const std::weak_ptr<ShardedUnits> units_;
  const std::size_t unit_;
};

std::string describe(const std::vector<std::pair<std::string, Tensor>>& parameters) {
  std::string lines;
  for (const auto& [name, parameter] : parameters) {
    lines += gradient::description_line(name, parameter);
  }
  return lines;
}

}  // namespace

ShardedUnits::ShardedUnits(const Communicator& ranks, FullyShardOptions options)
    : ranks_(ranks), options_(std::move(options)) {
  for (const auto& [name, dtype] :
       {std::pair("param_dtype", options_.param_dtype), std::pair("reduce_dtype", options_.reduce_dtype)}) {
    if (!dtype || *dtype == DType::float16 || *dtype == DType::bfloat16 || *dtype == DType::float32) continue;
    throw InvalidArgument(
        text("fully_shard: ", name, " is ", name_of(*dtype), "; it must be float16, bfloat16 or float32"));
  }
}

FlatShard::Precision ShardedUnits::precision_of(at::ScalarType dtype) const {
  if (dtype != at::kFloat) return {dtype, dtype};
  const auto gathered = options_.param_dtype ? ops::scalar_type_of(*options_.param_dtype) : dtype;
  return {gathered, options_.reduce_dtype ? ops::scalar_type_of(*options_.reduce_dtype) : gathered};
}

ShardedUnits::~ShardedUnits() {
  for (const auto& shard : shards_) forget_shard(shard);
}

bool is_sharded(const Tensor& parameter) { return ops::hook_of<UseUnit>(parameter) != nullptr; }

bool is_called_with_other_ranks(const torch::nn::Module& module) {
  const auto is_shared = [](const Tensor& parameter) {
    const auto partial = partial_of(parameter);
    return is_sharded(parameter) || (partial != nullptr && !partial->make_up_a_whole() && partial->ranks().size() > 1);
  };
  const auto parameters = module.parameters();
  return std::ranges::any_of(parameters, is_shared) || gradient::trains_over_ranks(module);
}

void ShardedUnits::add_examples(double examples) {
  if (at::GradMode::is_enabled()) weights_.add(examples);
}

void ShardedUnits::name_purposes() {
  if (named_after_ != ranks_.regroups()) {
    named_after_ = ranks_.regroups();
    name_ = text("fully_shard ", ranks_.group().next_number() + 1);
    counting_examples_ = Purpose("counting the examples of " + name_);
    comparing_gradients_ = Purpose("finding which gradients there are, for " + name_);
    for (const auto& unit : units_) unit->is_named = false;
  }
  for (const auto& unit : units_) {
    if (std::exchange(unit->is_named, true)) continue;
    for (const auto& flat : unit->flat)
      flat->name_purposes(text("unit \"", unit->name, "\" (", flat->names()[0], ") of ", name_));
  }
}

// The module's parameters that are in no unit yet; tied ones once.
ShardedUnits::Named ShardedUnits::new_parameters(const torch::nn::Module& module, const std::string& name) const {
  Named found;
  auto known = known_;
  for (const auto& each : module.named_parameters()) {
    const auto& parameter = each.value();
    if (std::ranges::find(known, parameter.unsafeGetTensorImpl()) != known.end()) continue;
    known.push_back(parameter.unsafeGetTensorImpl());
    found.emplace_back(name.empty() ? each.key() : text(name, ".", each.key()), parameter);
    if (!ops::has_values(parameter))
      throw InvalidArgument(text("fully_shard: ", found.back().first, " is divided already"));
    if (parameter.layout() != at::kStrided) {
      throw InvalidArgument(
          text("fully_shard: ", found.back().first, " is ", parameter.layout(), "; parameters must be dense"));
    }
    const auto& first = found.front();
    if (parameter.device() != first.second.device()) {
      throw InvalidArgument(text("fully_shard: ", found.back().first, " is on ", parameter.device().str(), " and ",
                                 first.first, " on ", first.second.device().str(),
                                 "; parameters that are gathered together must be on one device"));
    }
  }
  return found;
}

void ShardedUnits::add(const torch::nn::Module& module, const std::string& name, bool keep) {
  Named parameters;
  check_on_all(ranks_, [&] { parameters = new_parameters(module, name); });
  const auto precision = precision_of(at::kFloat);
  ranks_.check_all_agree(
      text("parameters of fully_shard's unit \"", name, "\""),
      text(describe(parameters), "param_dtype ", precision.gathered, ", reduce_dtype ", precision.summed, ", ",
           parameters.empty() ? "" : c10::DeviceTypeName(parameters[0].second.device().type(), /*lower_case=*/true)));
  for (const auto& [parameter, tensor] : parameters) {
    for_each_flat_shard([&, &wanted = parameter](const FlatShard& flat) {
      if (std::find(flat.names().begin(), flat.names().end(), wanted) == flat.names().end()) return;
      throw InvalidArgument(text("fully_shard: there is a parameter \"", wanted, "\" already; give each part a name"));
    });
    known_.push_back(tensor.unsafeGetTensorImpl());
  }
  const Purpose buffers(text("the buffers of fully_shard's unit \"", name, "\""));
  broadcast(ranks_.with_purpose(buffers), module.buffers());
  broadcast(options_.replicas.with_purpose(buffers), module.buffers());
  if (parameters.empty()) return;
  std::map<std::pair<bool, at::ScalarType>, Named> groups;
  for (const auto& each : parameters) {
    groups[{each.second.requires_grad(), each.second.scalar_type()}].push_back(each);
  }
  units_.push_back(std::make_unique<Unit>());
  units_.back()->name = name;
  units_.back()->keep = keep;
  for (const auto& [kind, group] : groups) add_flat(*units_.back(), group);
  name_purposes();
}

void ShardedUnits::add_flat(Unit& unit, const Named& parameters) {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  for (const auto& [name, parameter] : parameters) {
    names.push_back(name);
    tensors.push_back(parameter);
  }
  const auto place = options_.cpu_offload ? at::Device(at::kCPU) : tensors[0].device();
  unit.flat.push_back(std::make_unique<FlatShard>(names, tensors, ranks_, options_.replicas,
                                                  precision_of(tensors[0].scalar_type()), place));
  auto& flat = *unit.flat.back();
  if (writes_ != nullptr) flat.count_writes(writes_);
  const auto use = std::make_shared<UseUnit>(weak_from_this(), units_.size() - 1);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ops::add_hook(tensors[i], use);
    if (tensors[i].dim() == 2) ops::add_hook(tensors[i], std::make_shared<SplitWeight>(tensors[i]));
    if (flat.shard(i).numel() > 0) {
      shards_.push_back(flat.shard(i));
      know_shard(flat.shard(i), ranks_, partial_of(tensors[i]));
    }
    if (!tensors[i].requires_grad()) continue;
    ++unit.gradients;
    weights_.add_parameters({tensors[i]});
    after_accumulation_.emplace_back(tensors[i], [this, &unit, &flat, i] { on_gradient(unit, flat, i); });
  }
}

void ShardedUnits::use(std::size_t index, std::uint64_t call) {
  const auto uses = uses_.size();
  if (call != call_) {
    const bool may_release = options_.reshard_after_forward || ops::in_backward();
    for (const auto before : current_) {
      if (before == index || units_[before]->keep || !may_release) continue;
      for (const auto& flat : units_[before]->flat) flat->release();
    }
    if (current_ != std::vector{index}) uses_.push_back(index);
    current_ = {index};
    call_ = call;
  } else if (std::ranges::find(current_, index) == current_.end()) {
    current_.push_back(index);
    uses_.push_back(index);
  }
  for (const auto& flat : units_[index]->flat) {
    if (at::GradMode::is_enabled()) flat->check_frozen();
    // Each operator of a backward would look at all shards: there once is enough.
    if (uses_.size() > uses || !ops::in_backward()) flat->check_unchanged();
    flat->finish_gather();
  }
  if (options_.prefetch) prefetch();
}

// Begins to gather the unit that followed this use in the step before.
void ShardedUnits::prefetch() {
  const auto next = uses_.size();
  if (next >= uses_before_.size() || uses_before_[next - 1] != uses_.back()) return;
  for (const auto& flat : units_[uses_before_[next]]->flat) flat->start_gather();
}

void ShardedUnits::release() {
  if (backward_ && !ops::in_backward()) forget_backward();
  if (named_after_) name_purposes();
  for_each_flat_shard([](FlatShard& flat) { flat.release(); });
  current_.clear();
  if (!backward_) uses_.clear();
}

void ShardedUnits::abandon() {
  for_each_flat_shard([](FlatShard& flat) { flat.abandon_gather(); });
  forget_backward();
  release();
}

void ShardedUnits::on_gradient(Unit& unit, FlatShard& flat, std::size_t parameter) {
  const auto backward = torch::autograd::get_current_graph_task_id();
  if (backward == -1) {
    throw Error(
        "fully_shard: gradients of weights came after backward; in a Pipeline use a schedule that does not split it, "
        "such as one_forward_one_backward");
  }
  if (!backward_) begin_backward();
  if (backward_ != backward) {
    throw Error(
        "fully_shard: a backward inside another one, or after one that broke off; recompute activations with "
        "lockstep::recompute, and call release() after an exception in backward");
  }
  if (!flat.has_taken(parameter)) --unit.waits_for;
  flat.take_gradient(parameter, factor_);
  reduce_complete_units();
}

void ShardedUnits::begin_backward() {
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
  backward_ = torch::autograd::get_current_graph_task_id();
  if (given_factor_) {
    factor_ = *given_factor_;
  } else {
    // A rank that does not know its number tells the others, who wait for it.
    double mine = std::numeric_limits<double>::quiet_NaN();
    std::exception_ptr unknown;
    try {
      mine = weights_.of_this_backward();
    } catch (...) {
      unknown = std::current_exception();
    }
    const double all = summed(counting_examples_, {mine})[0];
    if (unknown) std::rethrow_exception(unknown);
    if (std::isnan(all)) {
      throw InvalidArgument("fully_shard: another rank does not know the number of its examples in this backward");
    }
    factor_ = all > 0 ? mine / all : 0;
  }
  // The order in which backward completes them, if forward used them in the order in which they were added.
  not_reduced_.clear();
  for (const bool keep : {true, false}) {
    for (const auto& unit : units_) {
      unit->waits_for = unit->gradients;
      if (unit->keep == keep && unit->gradients > 0) not_reduced_.push_back(unit.get());
    }
  }
}

// Forgets what a backward that broke off left.
void ShardedUnits::forget_backward() {
  for_each_flat_shard([](FlatShard& flat) { flat.forget_gradients(); });
  summed_ = nullptr;
  backward_.reset();
  uses_.clear();
}

// Reduces units on all ranks in the same order.
void ShardedUnits::reduce_complete_units() {
  while (!not_reduced_.empty() && not_reduced_.back()->waits_for == 0) {
    reduce(*not_reduced_.back());
    not_reduced_.pop_back();
  }
}

// The sums of one unit at a time go on beside backward, which bounds the memory of gradients.
void ShardedUnits::reduce(Unit& unit) {
  finish_sums();
  for (const auto& flat : unit.flat) {
    flat->release();
    if (flat->is_trained()) flat->start_sums();
  }
  summed_ = &unit;
}

void ShardedUnits::finish_sums() {
  if (summed_ == nullptr) return;
  for (const auto& flat : std::exchange(summed_, nullptr)->flat) flat->finish_sums();
}

void ShardedUnits::finish_backward() {
  while (!not_reduced_.empty()) {
    reduce(*not_reduced_.back());
    not_reduced_.pop_back();
  }
  finish_sums();
  std::vector<double> taken;
  for_each_parameter([&](const FlatShard& flat, std::size_t i) { taken.push_back(flat.has_taken(i) ? 1 : 0); });
  taken.push_back(have_shards_changed() ? 1 : 0);
  taken.push_back(is_any_cleared() ? 1 : 0);
  const auto by_all = summed(comparing_gradients_, taken);
  auto next = by_all.begin();
  for_each_flat_shard([&](FlatShard& flat) {
    std::vector<bool> by_any;
    for (std::size_t i = 0; i < flat.parameters().size(); ++i) by_any.push_back(*next++ > 0);
    if (flat.is_trained()) flat.set_gradients(by_any);
  });
  backward_.reset();
  uses_before_ = std::exchange(uses_, {});
  release();
  note_gradients();
  const auto warning = vain_steps_.after_backward(by_all.end()[-2] > 0, by_all.back() > 0);
  const bool counts_writes = writes_ != nullptr;
  if (counts_writes && !warning.empty() && ranks_.rank() == 0 && replicas().rank() == 0)
    log_warning("fully_shard: " + warning);
}

void ShardedUnits::note_gradients() {
  left_.clear();
  for_each_parameter([&](const FlatShard& flat, std::size_t i) { left_.push_back(noted(flat.shard(i).grad())); });
}

// True where a gradient to which this backward adds was cleared, or written, since note_gradients.
bool ShardedUnits::is_any_cleared() const {
  bool is_any = false;
  std::size_t next = 0;
  for_each_parameter([&](const FlatShard& flat, std::size_t i) {
    const auto place = next++;
    if (!flat.has_taken(i) || flat.shard(i).numel() == 0) return;
    const auto& gradient = flat.shard(i).grad();
    is_any = is_any || !gradient.defined() || place >= left_.size() || noted(gradient) != left_[place];
  });
  return is_any;
}

bool ShardedUnits::have_shards_changed() {
  std::int64_t version = 0;
  for_each_flat_shard([&](const FlatShard& flat) { version += flat.version(); });
  return std::exchange(version_, version) != version;
}

std::string VainSteps::after_backward(bool have_changed, bool is_any_cleared) {
  constexpr int kMostNotCleared = 8;    // steps: more than losses in turns add to gradients of each other
  constexpr int kMostUnchanged = 1000;  // backwards: more than steps that accumulate gradients have
  unchanged_ = have_changed ? 0 : unchanged_ + 1;
  not_cleared_ = is_any_cleared ? 0 : have_changed ? not_cleared_ + 1 : not_cleared_;
  if (not_cleared_ >= kMostNotCleared && !std::exchange(has_warned_of_gradients_, true)) {
    return text("after each of ", not_cleared_,
                " steps gradients were added to those of the step before: call "
                "zero_grad() of the optimizer, since the module's own clears nothing of the shards");
  }
  if (unchanged_ < kMostUnchanged || std::exchange(has_warned_of_shards_, true)) return {};
  return text(unchanged_,
              " backwards have added to the gradients of the shards, and nothing has changed the shards "
              "since: give optimizers the parameters() of what fully_shard returned, since the module's own have "
              "neither values nor gradients");
}

std::vector<double> ShardedUnits::summed(Purpose purpose, std::vector<double> values) const {
  ranks_.with_purpose(purpose).sum(values);
  options_.replicas.with_purpose(purpose).sum(values);
  return values;
}

}  // namespace lockstep::parallel
