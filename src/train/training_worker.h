// A worker of a strategy, with the state that it trains, as a member of the strategy's job.
#pragma once

#include <chrono>
#include <string>

#include "elastic/sections.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "strategy/strategy_impl.h"
#include "train/stragglers.h"

namespace lockstep::train {

class TrainingWorker : public elastic::Member {
 public:
  // `what`: "fit", for messages.
  TrainingWorker(StrategyImpl& strategy, std::string what)
      : strategy_(strategy), what_(std::move(what)), hang_watch_(watch_for_hangs(strategy, what_)) {}

  int rank() const final { return strategy_.topology().all.rank(); }
  int size() const final { return strategy_.topology().all.size(); }
  std::int64_t generation() const final { return strategy_.workers().membership()->world().generation; }
  std::vector<std::string> all_gather(const std::string& mine) final {
    return strategy_.topology().all.all_gather(mine);
  }
  std::string broadcast(const std::string& bytes, int root) final {
    return strategy_.topology().all.broadcast(bytes, root);
  }
  int row_size() const final { return strategy_.topology().row_size; }
  std::string broadcast_part(const std::string& bytes, int row) final;
  void regroup(const elastic::Change& change) final;
  void on_loss(const std::exception& error) final;
  void on_regrouped(int size_before, bool updated) final;
  std::string print_update() final;
  void take_update(const std::string& printed) final;
  std::string print_part() final;
  std::string print_all() final;
  void take_all(const std::string& printed, const std::string& printed_part) final;

  // Takes the place that the other workers have given this one.
  void join();

  // Returns the workers that make the same steps.
  virtual const Communicator& peers() const { return strategy_.topology().all; }

  // Called where the workers have another Group since the last call: all use the new one from here on. Collective.
  virtual void use_new_group() = 0;

  // Brings the variables of workers that train by themselves together (DiLoCo); does nothing for others. Collective.
  virtual void come_together() = 0;

  // True where workers that were told to leave at once leave one after each step: each may have the only copy of
  // another worker's state.
  virtual bool leaves_in_turn() const = 0;

  StrategyImpl& strategy() const { return strategy_; }
  const std::string& what() const { return what_; }

  bool waits = false;  // all wait for newcomers, which wait too

 protected:
  // Return the state that goes to another worker. `update`: an update that it lacks. A newcomer gets `part`, the state
  // of this worker's part of the model, and `common`, which is the same on all.
  virtual Trackable update() = 0;
  virtual Trackable part() = 0;
  virtual Trackable common() = 0;

  // Called when all have regrouped, and are at the same section; and when this worker has become the chief.
  virtual void on_same_section(bool /*updated*/) {}
  virtual void on_become_chief() {}

 private:
  StrategyImpl& strategy_;
  const std::string what_;
  std::chrono::steady_clock::time_point began_;
  bool was_chief_ = false;
  std::string loss_;
  const std::jthread hang_watch_;
};

}  // namespace lockstep::train
