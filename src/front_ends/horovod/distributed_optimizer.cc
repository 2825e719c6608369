#include <torch/optim/optimizer.h>

#include "base/process.h"
#include "base/text.h"
#include "front_ends/horovod/generations.h"
#include "front_ends/horovod/in_process_set.h"
#include "front_ends/horovod/operations.h"
#include "front_ends/horovod/session.h"
#include "gradient/gradient_reducer.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {
namespace {

struct Parameters {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
};

// The optimizer's parameters that require gradients.
Parameters parameters_of(const torch::optim::Optimizer& optimizer,
                         const torch::OrderedDict<std::string, Tensor>& named) {
  std::map<const void*, std::string> names;
  for (const auto& item : named) names[item.value().unsafeGetTensorImpl()] = item.key();
  Parameters found;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!parameter.requires_grad()) continue;
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name == names.end() && !named.is_empty()) {
        throw InvalidArgument(text("DistributedOptimizer: named_parameters have no name for the optimizer's parameter ",
                                   found.tensors.size(), ", which is ", parameter.scalar_type(), " ",
                                   parameter.sizes()));
      }
      found.names.push_back(name != names.end() ? name->second : text("parameter ", found.tensors.size()));
      found.tensors.push_back(parameter);
    }
  }
  return found;
}

// Prints the settings that ranks must agree on, one a line.
std::string text_of(const Parameters& parameters, const DistributedOptimizerOptions& options) {
  std::string all = text("op ", name_of(options.op), "\ncompression ", static_cast<int>(options.compression),
                         "\nbackward_passes_per_step ", options.backward_passes_per_step, "\n");
  for (std::size_t i = 0; i < parameters.names.size(); ++i) {
    const auto& tensor = parameters.tensors[i];
    all += text(parameters.names[i], " ", tensor.scalar_type(), " ", tensor.sizes(), "\n");
  }
  return all;
}

constexpr const char* kName = "DistributedOptimizer";
constexpr std::size_t kBucketBytes = 25 << 20;

DistributedOptimizerOptions checked(const DistributedOptimizerOptions& options) {
  check_gradient_op(options.op);
  if (!options.process_set.is_all() && Generations::current())
    throw InvalidArgument("DistributedOptimizer: process_set is not for elastic jobs, whose ranks change");
  require(options.backward_passes_per_step >= 1, "DistributedOptimizer: backward_passes_per_step",
          options.backward_passes_per_step, "at least 1");
  return options;
}

}  // namespace

struct DistributedOptimizer<torch::optim::Optimizer>::State {
  State(torch::optim::Optimizer& wrapped, Parameters parameters, const DistributedOptimizerOptions& asked)
      : optimizer(wrapped),
        options(checked(asked)),
        description(text_of(parameters, options)),
        trained(parameters.tensors),
        session(Session::current()),
        joins(Generations::current() && Generations::current()->lacks_state()),
        ranks(joins ? session->alone() : session->split(kName)) {
    if (!joins) ranks.check_all_agree(kName, description);
    reducer.emplace(parameters.names, std::move(parameters.tensors), ranks,
                    gradient::GradientReducerOptions{.buckets = {.bucket_bytes = kBucketBytes,
                                                                 .gradient_dtype = sent_dtype(options.compression),
                                                                 .idle_cores = session->size() < usable_cpu_count(),
                                                                 .called = kName},
                                                     .sum = options.op == Sum,
                                                     .zeros_for_unused = true});
    reducer->set_before_pass([this] { return begin_backward(); });
    joins ? use_new_session() : add_to_session();
    if (const auto generations = Generations::current())
      regroups = generations->on_regroup([this] { use_new_session(); });
  }
  ~State() { session->remove_optimizer(number); }

  void add_to_session() {
    const auto stream = session->stream_for(trained);
    const auto take_part = [this, stream] { return add_on_stream(shadow, stream, [this] { reducer->shadow_pass(); }); };
    number = session->add_optimizer(take_part, ranks);
  }

  // Goes on with other ranks, after a step that may have failed.
  void use_new_session() {
    session = Session::current();
    ranks.regroup(session->split(kName).group());
    ranks.check_all_agree(kName, description);
    reducer->prepare();
    passes = 0;
    met = compared = false;
    add_to_session();
  }

  bool begin_backward() {
    if (++passes < options.backward_passes_per_step) return false;
    begin_pass();
    return true;
  }

  void begin_pass() {
    passes = 0;
    auto mine = Announcement::of(text("a step of DistributedOptimizer ", number));
    mine.kind = Announcement::Kind::gradients;
    mine.optimizer = number;
    if (!compared) mine.own = static_cast<std::int64_t>(hash_of_values() | 1);  // never 0
    session->run([&] {
      compare_values(session->negotiate(mine));
      compared = true;
    });
    met = true;
  }

  std::uint64_t hash_of_values() const {
    std::uint64_t hash = 0;
    for (const auto& parameter : trained) hash = mix(hash, gradient::hash_of(parameter));
    return hash;
  }

  // Compares values before the first step: from other values the ranks would train apart. A rank that had joined then
  // makes its first step later, when others have compared. All look at the same announcements: all throw or none.
  static void compare_values(const std::vector<Announcement>& all) {
    const Announcement* first = nullptr;
    for (const auto& each : all) {
      if (each.kind != Announcement::Kind::gradients || each.own == 0) continue;  // joined, or compared before
      if (first == nullptr) first = &each;
      if (each.own == first->own) continue;
      throw InvalidArgument(text(kName, ": the ranks begin with other values of its parameters: those of rank ",
                                 first - all.data(), " have the hash ", first->own, ", those of rank ",
                                 &each - all.data(), " ", each.own,
                                 "; give all rank 0's by hvd::broadcast_parameters before the first step"));
    }
  }

  torch::optim::Optimizer& optimizer;
  const DistributedOptimizerOptions options;
  const std::string description;  // equal on all ranks
  const std::vector<Tensor> trained;
  std::shared_ptr<Session> session;
  const bool joins;  // the other ranks have been training
  const Communicator ranks;
  std::optional<gradient::GradientReducer> reducer;
  std::int64_t number = 0;
  int passes = 0;                     // backwards since gradients were last reduced
  bool met = false;                   // whether gradients were reduced since the last step
  bool compared = false;              // this rank has told its first values
  std::shared_ptr<void> regroups;     // while it lives, of an elastic job, there may be another session
  collective::ProgressThread shadow;  // takes part in the others' passes once this rank has joined
};

DistributedOptimizer<torch::optim::Optimizer>::DistributedOptimizer(torch::optim::Optimizer& optimizer,
                                                                    const DistributedOptimizerOptions& options)
    : DistributedOptimizer(optimizer, options, torch::OrderedDict<std::string, Tensor>()) {}

DistributedOptimizer<torch::optim::Optimizer>::DistributedOptimizer(
    torch::optim::Optimizer& optimizer, const DistributedOptimizerOptions& options,
    const torch::OrderedDict<std::string, Tensor>& named_parameters) {
  const InProcessSet in_set(options.process_set);
  state_ = std::make_shared<State>(optimizer, parameters_of(optimizer, named_parameters), options);
}

DistributedOptimizer<torch::optim::Optimizer>::~DistributedOptimizer() = default;

void DistributedOptimizer<torch::optim::Optimizer>::synchronize() {
  state_->reducer->prepare();
  if (state_->met && state_->passes == 0) return;
  state_->begin_pass();
  state_->reducer->reduce_accumulated();
}

Tensor DistributedOptimizer<torch::optim::Optimizer>::step(const std::function<Tensor()>& closure) {
  if (!closure) {
    synchronize();
    state_->met = false;
    return state_->optimizer.step();
  }
  return state_->optimizer.step([&] {
    auto loss = closure();
    synchronize();
    state_->met = false;
    return loss;
  });
}

void DistributedOptimizer<torch::optim::Optimizer>::zero_grad(bool set_to_none) {
  state_->optimizer.zero_grad(set_to_none);
}

}  // namespace lockstep::horovod
