// Decides when parameters of fully_shard are gathered, and reduces the gradients of a backward.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/backward_weights.h"
#include "gradient/gradient_hooks.h"
#include "gradient/parameter_parts.h"
#include "lockstep/parallel/fully_shard.h"
#include "parallel/flat_shard.h"

namespace torch::nn {
class Module;
}

namespace lockstep::parallel {

// Finds steps in which a user has the module's own parameters in the place of the shards, so that an optimizer changes
// nothing, or gradients are never cleared.
class VainSteps {
 public:
  // Returns a warning, once; else nothing. `have_changed`: since the backward before, any rank's shards have.
  // `is_any_cleared`: since then, any rank's gradient to which this backward adds was.
  std::string after_backward(bool have_changed, bool is_any_cleared);

 private:
  int unchanged_ = 0;    // backwards since shards have changed
  int not_cleared_ = 0;  // steps since gradients were cleared
  bool has_warned_of_shards_ = false, has_warned_of_gradients_ = false;
};

class ShardedUnits : public std::enable_shared_from_this<ShardedUnits> {
 public:
  ShardedUnits(const Communicator& ranks, FullyShardOptions options);
  ~ShardedUnits();

  // These functions are those of FullyShardedParameters.
  void add(const torch::nn::Module& module, const std::string& name, bool keep);
  void add_examples(double examples);
  void release();
  void expect_forwards() { weights_.expect_forwards(); }

  // Called before `add`. From then on an operator that writes one of this rank's shards makes all gathered values old.
  // This is for users who call the module past FullySharded, which releases the values before each forward.
  void count_writes() { writes_ = std::make_shared<std::atomic<std::int64_t>>(0); }
  gradient::BackwardWeights& weights() { return weights_; }

  // To be called after every write to gradients that does not clear them.
  void note_gradients();

  // Forgets a step that broke off, since another rank was lost.
  void abandon();

  // In place of add_examples: from now on gradients are sums over ranks and replicas, and this rank's count times
  // `factor`.
  void sum_gradients(double factor) { given_factor_ = factor; }

  // For an operator that reads a parameter of the unit: gathers the unit, and gives up those of operators before.
  // `call` numbers operators; one may read several units.
  void use(std::size_t unit, std::uint64_t call);

  const std::vector<Tensor>& shards() const { return shards_; }  // this rank's
  const Communicator& ranks() const { return ranks_; }
  const Communicator& replicas() const { return options_.replicas; }

  // Calls act in the order in which shards were added, the same on all ranks.
  template <class Act>
  void for_each_flat_shard(const Act& act) const {
    for (const auto& unit : units_) {
      for (const auto& flat : unit->flat) act(*flat);
    }
  }

  // Calls act(flat, i) for each parameter i of each flat shard.
  template <class Act>
  void for_each_parameter(const Act& act) const {
    for_each_flat_shard([&](const FlatShard& flat) {
      for (std::size_t i = 0; i < flat.parameters().size(); ++i) act(flat, i);
    });
  }

 private:
  using Named = std::vector<std::pair<std::string, Tensor>>;

  // Parameters that are gathered together: a FlatShard for each dtype, and for frozen ones.
  struct Unit {
    std::string name;
    bool is_named = false;  // its calls have purposes
    std::vector<std::unique_ptr<FlatShard>> flat;
    bool keep = false;          // gathered for the whole of a step
    std::size_t gradients = 0;  // of a whole backward
    std::size_t waits_for = 0;  // in this backward
  };

  Named new_parameters(const torch::nn::Module& module, const std::string& name) const;
  void add_flat(Unit& unit, const Named& parameters);
  FlatShard::Precision precision_of(at::ScalarType dtype) const;
  void name_purposes();
  void prefetch();
  void on_gradient(Unit& unit, FlatShard& flat, std::size_t parameter);
  void begin_backward();
  void reduce(Unit& unit);
  void finish_sums();
  void reduce_complete_units();
  void finish_backward();
  void forget_backward();
  bool have_shards_changed();
  bool is_any_cleared() const;
  std::vector<double> summed(Purpose purpose, std::vector<double> values) const;

  const Communicator ranks_;
  const FullyShardOptions options_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<const at::TensorImpl*> known_;  // the units' parameters
  std::vector<Tensor> shards_;
  std::shared_ptr<std::atomic<std::int64_t>> writes_;  // of shards; null: not counted
  std::vector<gradient::PostAccumulateHook> after_accumulation_;

  std::vector<std::size_t> current_;             // units that the last operator read
  std::uint64_t call_ = 0;                       // its number
  std::vector<std::size_t> uses_, uses_before_;  // units in this step and in the one before

  // The purposes of calls, which are numbered anew after a regroup.
  std::optional<std::int64_t> named_after_;  // how many regroups
  std::string name_;
  Purpose counting_examples_, comparing_gradients_;

  gradient::BackwardWeights weights_{
      {.caller = "fully_shard", .object = "sharded", .weight = gradient::BackwardWeights::Weight::as_told_always}};
  std::optional<double> given_factor_;
  std::optional<int> backward_;     // the graph task whose gradients are taken
  double factor_ = 1;               // of this backward's gradients
  std::vector<Unit*> not_reduced_;  // in this backward, the next last
  Unit* summed_ = nullptr;          // whose sums may go on
  std::int64_t version_ = 0;        // of all shards, after the last backward
  // A gradient, which is only compared, and its version.
  using Noted = std::pair<const at::TensorImpl*, std::uint32_t>;
  static Noted noted(const Tensor& gradient) {
    return {gradient.unsafeGetTensorImpl(), gradient.defined() ? gradient._version() : 0};
  }
  std::vector<Noted> left_;  // [shard], as the last backward or clip_grad_norm left it
  VainSteps vain_steps_;
};

// Calls add(unit, name, keep) for the submodules that match one of the patterns, and then for the module. Throws
// InvalidArgument for a pattern that none matches.
void add_units(torch::nn::Module& module, const std::vector<std::string>& patterns,
               const std::function<void(torch::nn::Module& unit, const std::string& name, bool keep)>& add);

// For strategies: returns the part that a rank trains of a module whose parameters are in these units. These are its
// shards, under the parameters' names in the module. Shards stay in one piece for each flat buffer of the units.
gradient::ModelPart own_part(const std::shared_ptr<ShardedUnits>& units, const torch::nn::Module& module);

// True where fully_shard has divided the module's parameter.
bool is_sharded(const Tensor& parameter);

// True where ranks that have other examples must call the module together: its parameters are sharded, or it has
// experts or, while it trains, layers over several ranks (gradient/layer_over_ranks.h).
bool is_called_with_other_ranks(const torch::nn::Module& module);

}  // namespace lockstep::parallel
