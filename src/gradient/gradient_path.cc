#include "gradient/gradient_path.h"

#include <cmath>

#include "base/log.h"
#include "base/text.h"
#include "gradient/gradient_exchange.h"
#include "gradient/one_pass.h"
#include "gradient/tree.h"
#include "lockstep/error.h"
#include "optimizer/describe.h"

namespace lockstep {
namespace {

const Communicator& ranks_of(const ReplicatedParameters& parameters, const Optimizer& optimizer) {
  const auto& own = optimizer.options().exchange;
  if (!own) return parameters.workers();
  if (parameters.workers().size() == 1) return own->ranks;
  throw InvalidArgument(
      text("the optimizer's gradients are summed with those of other processes, and so are those of the strategy's ",
           parameters.workers().size(), " workers; take one or the other"));
}

ShardMap shards_of(ReplicatedParameters& parameters, bool several_processes, const GradientPathOptions& options) {
  parameters.update_trainable();
  const auto exchange = several_processes ? Exchange::one_pass : options.exchange;
  if (exchange == Exchange::one_pass) return ShardMap::even(parameters.slots(), parameters.replicas());
  const int owner = exchange == Exchange::hierarchical_copy ? 0 : options.root;
  return ShardMap::all_to(owner, parameters.slots(), parameters.replicas());
}

std::unique_ptr<GradientSync> make_sync(const ReplicatedParameters& parameters, const Optimizer& optimizer,
                                        const Communicator& ranks, const GradientPathOptions& options) {
  const auto& own = optimizer.options().exchange;
  if (ranks.size() > 1) {
    return std::make_unique<Bucketed>(parameters, ranks, own ? own->buckets : options.buckets, own && own->sum);
  }
  if (options.exchange == Exchange::hierarchical_copy && parameters.replicas() > 1)
    return std::make_unique<Tree>(parameters);
  return std::make_unique<OnePass>(parameters);
}

}  // namespace

GradientPath::GradientPath(std::shared_ptr<ReplicatedParameters> parameters, const Optimizer& optimizer,
                           const GradientPathOptions& options)
    : parameters_(std::move(parameters)),
      ranks_(ranks_of(*parameters_, optimizer)),
      compare_copies_every_(ranks_.size() > 1 ? options.compare_copies_every : 0),
      updater_(parameters_, optimizer, shards_of(*parameters_, ranks_.size() > 1, options)),
      sync_(make_sync(*parameters_, optimizer, ranks_, options)),
      hooks_(*parameters_, *sync_) {
  if (parameters_->workers().size() > 1) prepare();
}

void GradientPath::prepare() {
  if (prepared_) return;
  if (ranks_.size() > 1) ranks_.check_all_agree("optimizers", describe(updater_.optimizer()));
  sync_->prepare();
  hooks_.install();
  prepared_ = true;
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
  const double loss_scale = updater_.loss_scale().value();
  if (!prepared_ && ranks_.size() > 1) {
    throw Error("an update before the other ranks' models and optimizers were compared");
  }
  hooks_.take_all(replica);
  if (replica == 0) updater_.begin_step();
  sync_->finish(replica, weight, updater_.loss_scale().used());
  replicas.barrier(deadline);  // every backward has ended well: from here on nothing throws but a deadline
  sync_->wait(replicas, deadline);

  const auto totals = sync_->totals();
  const bool updates = totals.finite && totals.weight > 0;
  if (updates) {
    updater_.update(*sync_, totals.weight * loss_scale / totals.divided_by, replicas, deadline);
    sync_->publish(replicas, deadline);
  }
  if (replica == 0 && totals.weight > 0 && !updater_.loss_scale().move(totals.finite)) {
    log_warning("gradients are not finite even with the smallest loss scale: this step changes nothing");
  }
  replicas.barrier(deadline);  // every copy is written, and nobody reads my gradients any more
  parameters_->refresh(replica);
  sync_->end_step(replica);
  if (replica == 0 && updates) {
    updater_.count_step();
    const bool compares = compare_copies_every_ > 0 && updater_.iterations() % compare_copies_every_ == 0;
    if (compares) parameters_->compare_copies(ranks_);
  }
  if (sync_->during_backward()) replicas.barrier(deadline);  // before it nobody else speaks to the other processes
}

bool GradientPath::can_be_recorded() const {
  return parameters_->placement() == Placement::device && !updater_.loss_scale().used() && ranks_.size() == 1;
}

void GradientPath::update_recorded(const Group& replicas, double weight, Deadline deadline) {
  hooks_.take_all(replicas.rank());
  updater_.update(*sync_, weight, replicas, deadline);
  sync_->end_step(replicas.rank());
}

}  // namespace lockstep
