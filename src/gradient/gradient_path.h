// The path of gradients, from backward to new values in all copies: hooks, then a reduction, then the updater.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/bucketed.h"
#include "gradient/buckets.h"
#include "gradient/direct.h"
#include "gradient/gradient_hooks.h"
#include "gradient/moving_state.h"
#include "gradient/outer_step.h"
#include "gradient/reduction.h"
#include "gradient/updater.h"

namespace lockstep::gradient {

// Values that others own and update, such as parameter servers. One thread, while no replica is in a step.
class RemoteValues {
 public:
  virtual ~RemoteValues() = default;

  // Brings the values to all copies of this process: all values, or those that others have changed since the last time.
  virtual void fetch(Deadline deadline) = 0;
  virtual void fetch_changed(Deadline deadline) = 0;

  // Brings this process's values, which were set from outside, to their owners.
  virtual void store(Deadline deadline) = 0;

  // Returns the reduction that brings gradients to whoever updates the values. This object must outlive it.
  virtual std::unique_ptr<Reduction> make_reduction() = 0;
};

// This process in a job in which processes are lost, leave and come.
struct ElasticRanks {
  bool is_newcomer = false;                         // this process comes to a job that runs, and has no state yet
  std::function<std::vector<std::string>()> hosts;  // returns the processes' hosts, as they are now: [rank]
};

struct GradientPathOptions {
  Exchange exchange = Exchange::one_pass;
  int root = 0;                               // the replica that updates for all (reduction_to_one_device)
  BucketOptions buckets;                      // between processes, or replicas on GPUs
  std::optional<ReplicaRanks> replicas = {};  // of Placement::device, where these are several
  bool shard_state = false;                   // each process has state for its own shards alone
  std::shared_ptr<RemoteValues> remote = {};  // null: this process, and those that train with it, own the values
  std::shared_ptr<ops::ProgramDevices> devices = {};  // that run compiled programs, and update; null: there are none
  std::int64_t compare_copies_every = 100;            // steps, with several processes; 0: never
  bool replace_differing_copies = false;              // by those that most processes have
  std::optional<ElasticRanks> elastic = {};
  std::optional<DiLoCoOptions> diloco = {};  // with the topology's `meetings`
};

}  // namespace lockstep::gradient

namespace lockstep {

// `apply` is called by every replica's thread at once, and methods that say so by a replica's thread; all others by one
// thread while no replica is in a step. After each apply all copies of the values are equal bit for bit. They are what
// one replica would have made of the whole batch, but for rounding: gradients are added in rank order.
class GradientPath {
 public:
  // With several processes the exchange inside each is one_pass. Collective over the strategy's workers where these are
  // several: throws InvalidArgument on all where the optimizers differ. Throws InvalidArgument for an optimizer with
  // GradientRanks where there are several workers, state is sharded, or devices run compiled programs.
  GradientPath(std::shared_ptr<ReplicatedParameters> parameters, const Optimizer& optimizer,
               const gradient::GradientPathOptions& options = {});

  // Called before the first step. Collective over the GradientRanks of the optimizer; does nothing for an optimizer
  // without. Throws InvalidArgument, on all, where they differ in model, optimizer or number of replicas.
  void prepare();

  // As GradientHooks; by the replica's thread.
  void expect_one_backward(int replica);
  void drop_gradients(int replica) { hooks_.drop(replica); }

  // Takes the gradients that backward left on this replica's parameters and updates all copies with
  //   (sum of the replicas' gradients) / (sum of the replicas' weights) / loss scale.
  // A parameter without a gradient on any replica stays unchanged, state included. All do where the sum of weights is
  // 0, or where a scaled loss has gradients that are not finite. Collective over `replicas`, the Group of this
  // process's replicas, and over the processes. Throws, with all values as they were, when a gradient cannot be used
  // here or on another replica, or when another replica failed (Aborted). In a step that is traced the update becomes
  // part of the program.
  void apply(const Group& replicas, double weight, Deadline deadline);

  // As `apply` in a step that is traced, where the replica's weight is a value of the program (TracedUpdate::apply).
  void apply_traced(ops::StepTrace& trace, const at::Tensor& weight, bool divides = true);

  // Brings values and state that devices or servers have updated to this process. Not while replicas run.
  void fetch(Deadline deadline);
  void fetch_from_devices(Deadline deadline) const;

  // In an elastic job, after the processes' Communicator has got another Group: prepares the next step with this Group.
  // Brings each process the state that the step needs. Collective, between steps; a second call does nothing. Throws as
  // MovingState::move.
  void regroup();

  // Called where a step failed here, and others say that they made its update: makes the update here too. Values of
  // other processes' shards stay old until regroup. Requires completes_updates().
  void complete_update();

  // Called when a whole state was loaded after StateLost.
  void tell_restored() {
    updater_.tell_state_loaded();
    if (moving_state_) moving_state_->tell_restored();
  }

  // Updates, and steps that made none since their gradients were not finite. Where processes train by themselves:
  // steps, which are equally many on all, also where one had no examples.
  std::int64_t decided_steps() const {
    return outer_ ? outer_->steps() : updater_.iterations() + updater_.loss_scale().skipped();
  }
  bool completes_updates() const { return updater_.commits(); }

  // True where each process has a part of the optimizer's state, which may be lost with some processes.
  bool divides_state() const { return reduction_->ownership().is_sharded(); }

  // For processes that train by themselves (GradientPathOptions::diloco): a meeting now, after which all values are
  // equal. Do nothing for others. Collective over the workers, between steps. After come_together the next meetings
  // come when they would have come without it.
  void meet();
  void come_together();
  void skip_step() {  // counts a step that other processes have made, each by itself, and this one leaves out
    if (outer_) outer_->skip_step();
  }
  gradient::OuterStep* outer_step() const { return outer_.get(); }  // null for others

  // For steps that are recorded and replayed (Placement::device, no scaled loss). update_recorded enqueues what `apply`
  // does on the device, for one replica; Updater::begin_step copies the learning rate to the device before each replay,
  // and Updater::count_step counts the update.
  bool can_be_recorded() const;
  void update_recorded(const Group& replicas, double weight, Deadline deadline);

  ReplicatedParameters& parameters() const { return *parameters_; }
  gradient::Updater& updater() { return updater_; }
  const gradient::Updater& updater() const { return updater_; }
  gradient::Reduction& reduction() { return *reduction_; }
  const gradient::Reduction& reduction() const { return *reduction_; }
  gradient::RemoteValues* remote() const { return remote_.get(); }  // null where this process updates the values

  // The processes whose gradients are summed: the strategy's, or those that came with the optimizer (GradientRanks).
  const Communicator& ranks() const { return ranks_; }

  // Steps between comparisons of what these processes have; 0: never, or this process is alone.
  std::int64_t compare_copies_every() const { return compare_copies_every_; }

 private:
  void begin_apart(const gradient::GradientPathOptions& options);
  void spread_meeting();
  void step_outside(const Group& replicas, Deadline deadline);
  void count_update();
  void move_loss_scale(bool finite);
  bool compares() const;
  void compare();
  void replace_differing_copies();

  const std::shared_ptr<ReplicatedParameters> parameters_;
  const Communicator ranks_;
  const std::int64_t compare_copies_every_;
  const bool replaces_differing_copies_;
  const std::shared_ptr<gradient::RemoteValues> remote_;
  const std::unique_ptr<gradient::Reduction> reduction_;
  gradient::Updater updater_;
  std::optional<gradient::TracedUpdate> traced_update_;
  gradient::GradientHooks hooks_;
  std::int64_t regroups_;                              // of all workers, with whose Groups the next step is made
  std::optional<gradient::MovingState> moving_state_;  // in an elastic job
  std::shared_ptr<gradient::OuterStep> outer_;         // where processes train by themselves
  bool met_ = false;  // whether the step that ends now has changed values by meeting; written by replica 0
  bool prepared_ = false;
};

}  // namespace lockstep
