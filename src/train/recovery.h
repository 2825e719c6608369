// How a training goes on when workers are lost, leave and join.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "elastic/sections.h"
#include "strategy/strategy_impl.h"
#include "train/hang_watch.h"

namespace lockstep::train {

// What a worker of a strategy trains, as a member of the job.
class TrainingWorker : public elastic::Member {
 public:
  // `what`: "fit", for messages.
  TrainingWorker(StrategyImpl& strategy, std::string what)
      : strategy_(strategy), what_(std::move(what)), hang_watch_(strategy, what_) {}

  int rank() const final { return strategy_.topology().all.rank(); }
  int size() const final { return strategy_.topology().all.size(); }
  std::int64_t generation() const final { return strategy_.membership().job().world().generation; }
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
  std::string print_all() final;
  void take_all(const std::string& printed, const std::string& printed_part) final;

  // Takes the place that the other workers have given this one.
  void join();

  // Where the workers' Group is another one since: what uses it uses the new one from here on. Collective.
  virtual void use_new_group() = 0;

  // Whether workers that were told to leave at once do so one behind each step: where each may have the only copy of
  // another one's state.
  virtual bool leaves_in_turn() const = 0;

  StrategyImpl& strategy() const { return strategy_; }
  const std::string& what() const { return what_; }

  // Whether all wait for newcomers, who then wait too.
  bool waits = false;

 protected:
  // All that a newcomer needs, as bytes; with print_part.
  virtual std::string print_state() = 0;
  virtual void take_state(std::string_view printed, std::string_view printed_part) = 0;

  // All have regrouped, and are at the same section, or this one has become the chief.
  virtual void on_same_section(bool /*updated*/) {}
  virtual void on_become_chief() {}

 private:
  StrategyImpl& strategy_;
  const std::string what_;
  std::chrono::steady_clock::time_point began_;
  bool was_chief_ = false;
  std::string loss_;
  const HangWatch hang_watch_;
};

// The sections of a training (elastic/sections.h). Where the strategy is not elastic each is called once, and nothing
// else here does anything.
//
// One thread, while no replica runs.
class Recovery {
 public:
  explicit Recovery(TrainingWorker& worker)
      : worker_(worker), sections_(worker, worker.strategy().completed_sections()) {}

  // The training has ended on all workers: nobody can join it any more.
  void end();

  // As Sections'.
  using Numbers = elastic::Sections::Numbers;
  void run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish);
  bool updated() const { return sections_.updated; }
  void set_updated() { sections_.updated = true; }

  // After an exception in what is not done again: where it is the loss of a worker with which the training can go on,
  // goes on behind it, with a warning that names `what`. Else false.
  bool goes_on_behind(const std::exception& error, const std::string& what);

  // Takes part in the training that the strategy's workers begin now: `description` has what must be the same for all
  // of them, in lines. A newcomer waits until they take it in, and gets their state; poll() is called meanwhile. False
  // where it comes too late for this training, which another one of the program may follow.
  bool take_part(const std::string& description, const std::function<void()>& poll);

  // Returns true where newcomers wait. Only the first worker of each host sees them; the others get false.
  bool newcomers_wait();

  // Behind a section in which all agreed on it: takes in newcomers, and, where it `leaves`, lets this worker go. As
  // Sections' returns false where they have to agree again.
  bool change(bool leaves);

 private:
  StrategyImpl& strategy() const { return worker_.strategy(); }

  TrainingWorker& worker_;
  elastic::Sections sections_;
  std::optional<elastic::OpenTraining> training_;  // of an elastic strategy, from take_part to the end
};

}  // namespace lockstep::train
