#include "gradient/gradient_path.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "base/text.h"
#include "gradient/mapped.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "optimizer/rules.h"

namespace lockstep {
namespace {

const Communicator& ranks_of(const ReplicatedParameters& parameters, const Optimizer& optimizer, bool shard_state) {
  const auto& own = optimizer.options().gradient_ranks;
  if (!own) return parameters.topology().gradients;
  if (shard_state) {
    throw InvalidArgument(
        "shard_optimizer_state: the optimizer's gradients are summed with those of other processes, each of which has "
        "all its state");
  }
  if (parameters.topology().gradients.size() == 1) return own->ranks;
  throw InvalidArgument(
      text("the optimizer's gradients are summed with those of other processes, and so are those of the strategy's ",
           parameters.topology().gradients.size(), " workers; take one or the other"));
}

// Where all processes share memory nothing is sent, so buckets help only where gradients are to have 16 bits, or
// processes may be lost.
std::unique_ptr<gradient::Reduction> reduction_with_sharded_state(ReplicatedParameters& parameters,
                                                                  const Communicator& ranks,
                                                                  const gradient::GradientPathOptions& options) {
  const bool in_host_memory = parameters.placement() != gradient::Placement::device;
  if (in_host_memory && !options.buckets.gradient_dtype && !options.elastic) {
    if (auto mapped = gradient::Mapped::make(parameters, ranks)) return mapped;
  }
  gradient::BucketedOptions bucketed{.buckets = options.buckets, .shard_state = true, .replicas = options.replicas};
  if (options.elastic) bucketed.hosts = options.elastic->hosts;
  return std::make_unique<gradient::Bucketed>(parameters, ranks, std::move(bucketed));
}

std::unique_ptr<gradient::Reduction> reduction_for(ReplicatedParameters& parameters, const Optimizer& optimizer,
                                                   const Communicator& ranks,
                                                   const gradient::GradientPathOptions& options) {
  if (options.devices) {  // whose programs sum gradients
    if (optimizer.options().gradient_ranks) {
      throw InvalidArgument(
          "the optimizer's gradients are summed with those of other processes, which a compiled "
          "step's are not; let TPUStrategy have the devices of all processes");
    }
    return std::make_unique<gradient::Direct>(parameters);
  }
  const bool are_summed = parameters.is_split() && parameters.split()->sums_in_backward();
  const bool may_get_others = options.elastic && !are_summed && !options.diloco;
  if (ranks.size() > 1 || may_get_others) {
    if (const auto& own = optimizer.options().gradient_ranks) {
      return std::make_unique<gradient::Bucketed>(
          parameters, ranks,
          gradient::BucketedOptions{.buckets = {.gradient_dtype = own->gradient_dtype}, .sum = own->sum});
    }
  }
  if (ranks.size() > 1 || options.replicas || may_get_others) {
    if (options.shard_state) return reduction_with_sharded_state(parameters, ranks, options);
    return std::make_unique<gradient::Bucketed>(
        parameters, ranks, gradient::BucketedOptions{.buckets = options.buckets, .replicas = options.replicas});
  }
  if (options.remote) return options.remote->make_reduction();
  return std::make_unique<gradient::Direct>(parameters, options.exchange, options.root);
}

void prepare_reduction(gradient::Reduction& reduction, const ReplicatedParameters& parameters,
                       const Optimizer& optimizer, const Communicator& ranks) {
  const auto& topology = parameters.topology();
  const auto& all = topology.meetings.size() > 1 ? topology.all : ranks;
  if (all.size() > 1)
    all.check_all_agree("optimizers", text(optimizer::describe(optimizer), "\n", parameters.describe_frozen()));
  reduction.prepare();
}

// True where the strategy's workers prepare at once: those that come later do so when they are alone.
bool is_prepared_at_once(const ReplicatedParameters& parameters, const Communicator& ranks,
                         const gradient::GradientPathOptions& options) {
  return parameters.topology().gradients.size() > 1 || options.diloco || options.replicas ||
         (options.elastic && ranks.size() == 1);
}

std::unique_ptr<gradient::Reduction> make_reduction(ReplicatedParameters& parameters, const Optimizer& optimizer,
                                                    const Communicator& ranks,
                                                    const gradient::GradientPathOptions& options) {
  parameters.update_trainable();
  parameters.regroup();
  auto reduction = reduction_for(parameters, optimizer, ranks, options);
  if (is_prepared_at_once(parameters, ranks, options)) prepare_reduction(*reduction, parameters, optimizer, ranks);
  return reduction;
}

// In an elastic job only some may have made an update when a process is lost. The others take values and state from
// them, except where each has its own part: then all wait for each other before an update.
std::optional<Communicator> ranks_that_commit(const ReplicatedParameters& parameters,
                                              const gradient::GradientPathOptions& options) {
  if (!options.elastic || !(options.shard_state || parameters.is_split())) return std::nullopt;
  return parameters.topology().all;
}

std::string state_of(const gradient::Updater& updater) {
  return updater.state_is_as_remembered() ? "a state as its last step left it"
                                          : "a state that changed since its last step";
}

}  // namespace

GradientPath::GradientPath(std::shared_ptr<ReplicatedParameters> parameters, const Optimizer& optimizer,
                           const gradient::GradientPathOptions& options)
    : parameters_(std::move(parameters)),
      ranks_(ranks_of(*parameters_, optimizer, options.shard_state)),
      compare_copies_every_(ranks_.size() > 1 || options.elastic || options.diloco || parameters_->is_split()
                                ? options.compare_copies_every
                                : 0),
      replaces_differing_copies_(options.replace_differing_copies),
      remote_(options.remote),
      reduction_(make_reduction(*parameters_, optimizer, ranks_, options)),
      updater_(parameters_, optimizer, reduction_->ownership(), ranks_that_commit(*parameters_, options)),
      hooks_(*parameters_, *reduction_),
      regroups_(parameters_->topology().all.regroups()) {
  if (options.devices) traced_update_.emplace(*parameters_, updater_, *options.devices);
  if (options.elastic) {
    const auto& topology = parameters_->topology();
    const auto& same_parts = parameters_->is_split() ? topology.same_part : options.diloco ? topology.all : ranks_;
    moving_state_.emplace(parameters_, same_parts, reduction_->ownership(), !options.elastic->is_newcomer,
                          /*trains_apart=*/options.diloco.has_value());
  }
  if (options.diloco) begin_apart(options);
  if (!is_prepared_at_once(*parameters_, ranks_, options)) return;
  hooks_.install();
  prepared_ = true;
}

// All begin with the chief's values: after an earlier optimizer's last meeting they may differ.
void GradientPath::begin_apart(const gradient::GradientPathOptions& options) {
  if (updater_.loss_scale().used()) {
    throw InvalidArgument(
        "`diloco` is not for a LossScaleOptimizer, whose scale would differ between workers: bfloat16 needs none");
  }
  std::vector<at::Tensor> trained, values;
  for (const auto& slot : parameters_->slots()) {
    if (!slot.trainable) continue;
    trained.push_back(parameters_->flat(0, slot.dtype).narrow(0, slot.offset, slot.numel).view(slot.sizes));
  }
  for (const auto dtype : {at::kFloat, at::kDouble}) values.push_back(parameters_->flat(0, dtype));
  broadcast(parameters_->topology().all.with_purpose(Purpose("the values with which workers begin")), values);
  parameters_->spread_first_copy();
  outer_ = std::make_shared<gradient::OuterStep>(trained, parameters_->topology().meetings, *options.diloco,
                                                 "variables", !(options.elastic && options.elastic->is_newcomer));
  std::vector<std::size_t> number(parameters_->slots().size());  // [slot]: among those that are trained
  for (std::size_t i = 0, next = 0; i < number.size(); ++i) {
    number[i] = next;
    next += parameters_->slots()[i].trainable ? 1 : 0;
  }
  const std::weak_ptr<gradient::OuterStep> outer = outer_;
  parameters_->watch_values({.who = outer_.get(),
                             .on_assign =
                                 [outer, number, parameters = parameters_.get()](std::size_t slot) {
                                   const auto alive = outer.lock();
                                   if (alive && parameters->slots()[slot].trainable)
                                     alive->begin_anew_from(number[slot]);
                                 },
                             .before_save =
                                 [outer] {
                                   if (const auto alive = outer.lock()) alive->require_together();
                                 }});
}

void GradientPath::meet() {
  if (!outer_) return;
  outer_->meet();
  spread_meeting();
}

void GradientPath::come_together() {
  if (!outer_) return;
  outer_->come_together();
  spread_meeting();
}

// In an elastic job a meeting is a section. Who completes the section must know that all have met, also where there was
// nothing to send.
void GradientPath::spread_meeting() {
  parameters_->spread_first_copy();
  if (moving_state_) parameters_->topology().all.any(false);
}

// Each replica calls it at the end of a step, when its update is complete.
void GradientPath::step_outside(const Group& replicas, Deadline deadline) {
  const int replica = replicas.rank();
  if (!parameters_->are_watched_by(outer_.get())) {
    throw InvalidArgument(
        "`diloco`: another optimizer was made for this model later; the workers bring its variables together by one");
  }
  if (replica == 0) met_ = outer_->advance();
  replicas.barrier(deadline);
  if (met_) parameters_->take_first_copy(replica);
}

void GradientPath::prepare() {
  if (prepared_) return;
  prepare_reduction(*reduction_, *parameters_, updater_.optimizer(), ranks_);
  hooks_.install();
  prepared_ = true;
}

// Gradients that change after backward are not sent while it runs.
void GradientPath::expect_one_backward(int replica) {
  if (const auto& split = parameters_->split(); split && split->after_backward) return;
  hooks_.expect_one_backward(replica);
}

void GradientPath::apply(const Group& replicas, double weight, Deadline deadline) {
  const int replica = replicas.rank();
  if (replicas.size() != parameters_->replicas()) {
    throw InvalidArgument(text("an optimizer for ", parameters_->replicas(), " replicas is applied on ",
                               replicas.size(), "; make model and optimizer with the strategy that runs them"));
  }
  if (!(weight >= 0) || std::isinf(weight)) {
    throw InvalidArgument(text("a replica's weight is ", weight, "; it must be 0 (no examples) or more, and finite"));
  }
  if (auto* const trace = ops::current_trace()) {
    if (!traced_update_)
      throw InvalidArgument("an optimizer of another strategy is applied in a step that is compiled for devices");
    if (weight == 0) return;  // on all replicas, which run the same program
    const auto options = trace->value_of(parameters_->variable(0)).options().requires_grad(false).dtype(at::kFloat);
    return apply_traced(*trace, at::full({}, weight, options));
  }
  const double loss_scale = updater_.loss_scale().value();
  if (!prepared_ && ranks_.size() > 1) {
    throw Error("an update before the other ranks' models and optimizers were compared");
  }
  if (const auto& split = parameters_->split()) {
    if (split->after_backward) split->after_backward();
    if (split->summed_over) split->summed_over->sum({&weight, 1});
  }
  hooks_.take_all(replica);
  if (replica == 0) {
    if (reduction_->take_lost_update()) updater_.tell_broke_off();
    updater_.begin_step();
  }
  auto sums = reduction_->finish(replicas, weight, /*check_finite=*/updater_.loss_scale().used(), deadline);

  // In an elastic job the others go on from these values, which a lost rank's sums must not spoil.
  if (moving_state_ && parameters_->placement() == gradient::Placement::device)
    ranks_.group().synchronize(ranks_.deadline());
  sums.finite = updater_.all_finite(sums.finite);
  const bool updates = sums.finite && sums.weight > 0;
  if (updates && compares()) {  // before the update, since gathered values are always equal
    if (replica == 0) compare();
    replicas.barrier(deadline);
  }
  bool is_counted = false;
  if (updates) {
    updater_.update(sums, sums.weight * loss_scale / sums.divided_by, replicas, deadline);
    if (updater_.commits()) {  // others may complete the update from here on, though `publish` may fail
      replicas.barrier(deadline);
      is_counted = true;
      if (replica == 0) {
        move_loss_scale(sums.finite);
        count_update();
      }
    }
    reduction_->publish(replicas, deadline);
  }
  if (replica == 0 && sums.weight > 0 && !is_counted) move_loss_scale(sums.finite);
  replicas.barrier(deadline);  // every copy is written, and no other replica reads this one's gradients any more
  parameters_->refresh(replica);
  if (replica == 0 && updates && !is_counted) count_update();  // before anything else that may throw
  reduction_->end_step(replica, gradient::Reduction::StepEnd::complete);
  if (reduction_->during_backward()) replicas.barrier(deadline);  // replica 0's end_step may use the processes' Group
  if (outer_) step_outside(replicas, deadline);
}

void GradientPath::apply_traced(ops::StepTrace& trace, const at::Tensor& weight, bool divides) {
  traced_update_->apply(trace, weight, divides);
}

void GradientPath::fetch(Deadline deadline) {
  if (remote_) remote_->fetch(deadline);
  fetch_from_devices(deadline);
}

void GradientPath::fetch_from_devices(Deadline deadline) const {
  parameters_->fetch(deadline);
  if (traced_update_) traced_update_->fetch(deadline);
}

void GradientPath::count_update() {
  updater_.count_step();
  if (compares()) updater_.remember_state();
}

void GradientPath::move_loss_scale(bool finite) {
  if (updater_.loss_scale().move(finite)) return;
  log_warning("gradients are not finite even with the smallest loss scale: this step changes nothing");
}

void GradientPath::regroup() {
  const auto regroups = parameters_->topology().all.regroups();
  if (std::exchange(regroups_, regroups) == regroups) return;
  for (int replica = 0; replica < parameters_->replicas(); ++replica) hooks_.drop(replica);  // of a step that broke off
  parameters_->regroup();
  if (prepared_) reduction_->prepare();
  moving_state_->move(updater_);
  if (!outer_) return;
  outer_->regroup();
  parameters_->spread_first_copy();
}

void GradientPath::complete_update() {
  updater_.complete();
  count_update();
}

// True where copies are compared before the next update.
bool GradientPath::compares() const {
  return compare_copies_every_ > 0 && (updater_.iterations() + 1) % compare_copies_every_ == 0;
}

// Compares values with those of the other processes. Optimizer state may exist in this process alone, so it is compared
// with its hash after the last step: that finds changes since.
void GradientPath::compare() {
  if (parameters_->is_split()) parameters_->compare_whole_copies();
  if (replaces_differing_copies_) replace_differing_copies();
  parameters_->compare_copies(ranks_);
  ranks_.check_all_agree("optimizer states", state_of(updater_));
}

// Where more than half of the processes have the same values and optimizer states, the others take these.
void GradientPath::replace_differing_copies() {
  const auto all = ranks_.all_gather(parameters_->hashes() + state_of(updater_));
  const auto times = [&](const std::string& one) { return std::ranges::count(all, one); };
  const auto root = std::ranges::find_if(
      all, [&](const auto& one) { return 2 * times(one) > static_cast<std::ptrdiff_t>(all.size()); });
  if (root == all.end() || times(*root) == static_cast<std::ptrdiff_t>(all.size())) return;
  const auto rank = static_cast<int>(root - all.begin());
  for (std::size_t other = 0; ranks_.rank() == rank && other < all.size(); ++other) {
    if (all[other] == *root) continue;
    const auto [mine, theirs] = first_difference(*root, all[other]);
    log_warning(text("worker ", other, " had ", theirs, ", and most workers ", mine, ": it gets worker ", rank,
                     "'s values and optimizer state"));
  }
  std::vector<at::Tensor> values;
  const auto& slots = parameters_->slots();
  const auto states = updater_.optimizer().rule().states().size();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    values.push_back(parameters_->parameter(0, i));
    for (std::size_t k = 0; slots[i].trainable && k < states; ++k) values.push_back(updater_.state(i, k));
  }
  broadcast(ranks_, values, rank);
  updater_.spread_state();
  for (std::size_t i = 0; i < slots.size(); ++i) parameters_->assign(i, parameters_->parameter(0, i));
  updater_.remember_state();
}

bool GradientPath::can_be_recorded() const {
  return parameters_->placement() == gradient::Placement::device && parameters_->replicas() == 1 &&
         !updater_.loss_scale().used() && ranks_.size() == 1 && !outer_;
}

void GradientPath::update_recorded(const Group& replicas, double weight, Deadline deadline) {
  hooks_.take_all(replicas.rank());
  const auto sums = reduction_->finish(replicas, weight, /*check_finite=*/false, deadline);
  updater_.update(sums, weight, replicas, deadline);
  reduction_->end_step(replicas.rank(), gradient::Reduction::StepEnd::complete);
}

}  // namespace lockstep
