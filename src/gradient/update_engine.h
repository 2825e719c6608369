// Where gradients become an average and the average becomes new values: reduce, update and broadcast in one pass.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gradient/device_update.h"
#include "gradient/loss_scale.h"
#include "gradient/replicated_parameters.h"
#include "gradient/worker_gradients.h"
#include "lockstep/group.h"
#include "lockstep/optimizer.h"
#include "optimizer/flat_update.h"

namespace lockstep {

// How the gradients of replicas meet.
enum class Exchange {
  one_pass,                 // replica i of N sums slice i of all gradients, updates it, and writes it to all copies
  reduction_to_one_device,  // one replica does this for all slices
  hierarchical_copy,        // sums pairwise up a tree, updates at its root, copies down the same tree
};

// The state of an optimizer for the parameters of a model, stored once for all replicas.
//
// `apply` is called by every replica's thread at once; everything else by one thread while no replica is in `apply`.
// All copies of the values are equal bit for bit after each apply, and equal to what one replica would have made of the
// whole batch, but for rounding: gradients are added in rank order.
class UpdateEngine {
 public:
  // `root` is the replica that updates for all (reduction_to_one_device). With several workers the exchange is one_pass
  // inside each. Throws InvalidArgument for an optimizer with an exchange where the strategy has several workers.
  UpdateEngine(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, Exchange exchange, int root = 0,
               WorkerGradientsOptions between_workers = {});
  ~UpdateEngine();

  // The replica's next backward makes all its gradients of this step: they may be sent while it goes on. Called by its
  // thread; ends with `apply`.
  void expect_one_backward(int replica);

  // Takes the gradients that backward left on this replica's parameters and updates all copies with
  //   (sum of the replicas' gradients) / (sum of the replicas' weights) / loss_scale().
  // A parameter that no replica has a gradient for stays as it is, state included; all do with a sum of weights of 0,
  // and where a scaled loss has gradients that are not finite.
  // Collective over `group`, whose ranks are the replicas of this process, and over the workers. Throws, with all
  // values as they were, when a gradient cannot be used here or on another replica, or when another replica failed
  // (Aborted).
  void apply(const Group& group, double weight, Deadline deadline);

  // For steps that are recorded and played again (Placement::device, no scaled loss). update_recorded enqueues what
  // `apply` does on the device, for one replica; begin_update brings the learning rate there before each play, and
  // count_update counts the update.
  bool can_be_recorded() const { return !device_updates_.empty() && !loss_scale_.used() && workers_ == nullptr; }
  void update_recorded(double weight);
  void begin_update();
  void count_update() { ++iterations_; }

  // Forgets what an earlier backward left on this replica's parameters. Called by its thread, before a step.
  void drop_gradients(int replica);

  const Optimizer& optimizer() const { return optimizer_; }
  ReplicatedParameters& parameters() const { return *parameters_; }

  // Updates that were made.
  std::int64_t iterations() const { return iterations_; }
  void set_iterations(std::int64_t iterations) { iterations_ = iterations; }

  // The processes whose gradients meet: the strategy's, or those of the optimizer's exchange.
  const Communicator& workers() const;

  // Before the first step, where the optimizer has an exchange; does nothing else. Collective over its workers. Throws
  // InvalidArgument, on all, where they differ in model, optimizer or number of replicas.
  void meet_exchange();

  // How gradients are sent to other workers: where a sum's order is another, its bits may be.
  WorkerGradients::Learned learned_of_workers() const;
  void restore_learned_of_workers(const WorkerGradients::Learned& learned);

  // What losses are multiplied by before backward; constant while replicas run backward.
  double loss_scale() const { return loss_scale_.value(); }
  LossScale& loss_scale_state() { return loss_scale_; }

  // The rate of the next update. One that is set holds until another is.
  double learning_rate() const;
  void set_learning_rate(double rate);
  std::optional<double> learning_rate_override() const { return rate_override_; }
  void restore_learning_rate(std::optional<double> override_rate) { rate_override_ = override_rate; }

  // State `index` (of the rule's states()) of the parameter, in its shape: a view of the stored values.
  at::Tensor state(std::size_t slot, std::size_t index) const;

 private:
  // A stretch of one parameter that one replica updates.
  struct Range {
    std::size_t slot;
    std::int64_t begin;
    std::int64_t count;
  };

  // What a replica brings to one apply. A cache line apart: replicas write their own.
  struct alignas(64) Contribution {
    std::vector<at::Tensor> gradients;  // [slot], undefined where there is none
    double weight = 0;
    bool expects_backward = false;
    bool finite = true;           // checked where the loss is scaled
    std::vector<double> squares;  // [slot]: sums over this replica's ranges
  };

  class Hook;
  struct Hooked {
    int replica;
    std::size_t slot;
  };

  void make_worker_gradients(const WorkerGradientsOptions& options);
  void hook_gradients();
  void assign_ranges(int root);
  void take_gradient(int replica, std::size_t slot);
  void meet_other_workers(const Group& group, Deadline deadline);
  at::Tensor device_gradient(std::size_t slot) const;
  void take_gradients(int replica);
  void update_on_device(double divide_by);
  bool finite_gradients(int replica) const;
  double total_weight() const;
  bool all_finite() const;
  void update_ranges(int replica, double divide_by);
  void update_clipped_by_norm(const Group& group, double divide_by, Deadline deadline);
  double norm_factor(std::size_t slot) const;
  void sum_up_tree(const Group& group, Deadline deadline);
  void copy_down_tree(const Group& group, Deadline deadline);

  template <class T>
  void update_range(const Range& range, std::vector<const T*> gradients, const GradientScale& scale);
  template <class T>
  std::vector<const T*> gradients_of(const Range& range) const;
  template <class T>
  T* summed(const Range& range) const;
  template <class Visit>
  void visit(const Range& range, const Visit& visit) const;
  bool has_gradient(std::size_t slot) const;

  // Constant after construction.
  const std::shared_ptr<ReplicatedParameters> parameters_;
  const Optimizer optimizer_;
  const Exchange exchange_;
  std::vector<std::vector<Range>> ranges_;              // [replica]
  std::vector<at::Tensor> state_float_, state_double_;  // [state], flat
  at::Tensor summed_float_, summed_double_;             // flat; for clipping by norm
  std::vector<at::Tensor> tree_float_, tree_double_;    // [replica], flat; for hierarchical_copy

  std::unique_ptr<WorkerGradients> workers_;  // null where this process is alone
  std::vector<Hooked> hooked_;

  std::vector<DeviceUpdate> device_updates_;  // float's and double's; Placement::device only

  std::vector<Contribution>
      contributions_;            // [replica]; written by that replica before the barrier that lets others read
  std::int64_t iterations_ = 0;  // written by replica 0 after the last barrier of an apply
  LossScale loss_scale_;         // written by replica 0 between the barriers of an apply
  std::optional<double> rate_override_;
  UpdateStep step_;  // of the current apply; written by replica 0 before the first barrier
};

}  // namespace lockstep
