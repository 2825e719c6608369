// A training of a strategy's workers: the sections that they complete together, and what they agree on.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "train/signal_guard.h"
#include "train/training_worker.h"

namespace lockstep::train {

// This class is for workers that stay the same. ElasticTraining is for workers that are lost, leave and join.
//
// All agree after each step and epoch: if one worker stopped alone, the others would wait for it. The numbers of an
// agreement go with the sums that workers make anyway.
//
// One thread, while no replica runs.
class Training {
 public:
  // Makes the training that the worker's strategy needs. `worker` and `signals` must outlive the training. `signals`:
  // they end it; null where none do.
  static std::unique_ptr<Training> of(TrainingWorker& worker, const SignalGuard* signals = nullptr);

  Training(TrainingWorker& worker, const SignalGuard* signals) : worker_(worker), signals_(signals) {}
  virtual ~Training() = default;
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // Takes part in the training that the strategy's workers begin now. describe(): lines that must be the same for
  // all, asked for where workers may join. A newcomer waits until the workers take it in, and gets their state. False
  // where it comes too late for this training; another one of the program may follow. Throws Interrupted.
  virtual bool take_part(const std::function<std::string()>& /*describe*/) { return true; }

  // The training has ended on all workers: nobody can join it any more.
  virtual void end() {}

  // --- sections (elastic/sections.h)

  // A section: act() is collective, and returns equal numbers on all workers; finish(numbers) completes the section.
  using Numbers = elastic::Sections::Numbers;
  using Finish = std::function<void(const Numbers& numbers)>;
  virtual void run(const std::function<Numbers()>& act, const Finish& finish);

  // Calls act() as a section; within a section, as a part of that one. Returns its numbers.
  virtual Numbers run_or_act(const std::function<Numbers()>& act) { return act(); }

  // True once the section's update of the model has been made, as act() says. Where the section is repeated, it may be
  // true when act() begins.
  virtual bool& updated() { return updated_; }

  // Call it after an exception in work that is not repeated. Where a worker is lost, and the training can go on without
  // it, goes on after that work, with a warning that names `what`. Else returns false.
  virtual bool goes_on_after(const std::exception& /*error*/, const std::string& /*what*/) { return false; }

  // --- what the peers agree on

  // Agrees in a section of its own.
  void agree(bool stops);

  // Agrees in a section that sums numbers over the peers anyway. Its act() returns sum_with_agreement(stops, numbers,
  // sum): `numbers` are this worker's; sum(all) returns what the section has besides, and the sums of `all` at the end.
  // Its finish() calls take_agreement, which returns the section's own sums. Throws InvalidArgument where another
  // worker made another call.
  using Sum = std::function<Numbers(std::span<const double> all)>;
  Numbers sum_with_agreement(bool stops, Numbers numbers, const Sum& sum);
  Numbers sum_with_agreement(bool stops, Numbers numbers);  // the sums alone
  std::span<const double> take_agreement(const Numbers& sums);

  // Results of the last agreement: how many workers made it, some of which may be lost since; and whether one wanted to
  // stop. signal(): the signal that ends the training for all, or 0.
  double workers() const { return agreed_[mark] / kMark; }
  bool stopping() const { return agreed_[stops_] > 0; }
  int signal() const;

  // Returns " (rank 1 is the launcher's rank 2)" where the launcher calls that worker by another number, else "".
  virtual std::string launchers_rank(int /*rank*/) const { return {}; }

  // Call it after an agreement. Workers that were told to end leave while enough others remain; their calls throw
  // Interrupted. Newcomers are taken in. Where too few workers are left, they wait for newcomers. Where none comes,
  // calls save() and throws ClusterError.
  virtual void change_workers(const std::function<void()>& /*save*/) {}

  // Waits as change_workers does, on a newcomer which finds that the others wait.
  virtual void wait_for_newcomers(const std::function<void()>& /*save*/) {}

 protected:
  enum { stops_, interrupted, terminated, newcomers, waited, mark, kSize };
  using Says = std::array<double, kSize>;

  // Returns this worker's part of an agreement.
  virtual Says says(bool stops);

  int received() const { return signals_ != nullptr ? signals_->received() : 0; }

  TrainingWorker& worker_;
  Says agreed_{};            // the sums
  bool has_agreed_ = false;  // in the section that runs, or ran last

 private:
  static constexpr double kMark = 0x5eed'1d'ea;  // no other sum is likely to have it in its place

  Numbers checked(const std::function<Numbers()>& sum) const;

  const SignalGuard* const signals_;
  bool updated_ = false;
};

}  // namespace lockstep::train
