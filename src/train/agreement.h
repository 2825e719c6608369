// What workers agree on after each step: whether the training stops, who was told to end, and whether newcomers wait.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "train/recovery.h"
#include "train/signal_guard.h"

namespace lockstep::train {

// All agree after each step and epoch: if one worker stopped alone, the others would wait for it. What a worker says is
// summed with what they sum anyway.
//
// One thread, while no replica runs.
class Agreement {
 public:
  // `peers`: who make the same steps.
  Agreement(TrainingWorker& worker, Recovery& recovery, const SignalGuard& signals,
            std::function<const Communicator&()> peers)
      : worker_(worker), recovery_(recovery), signals_(signals), peers_(std::move(peers)) {}

  static constexpr std::size_t kSize = 6;

  // What this worker says; and the sums, which end with those of what each said.
  std::array<double, kSize> mine(bool stops);
  void finish(std::span<const double> sums);

  // Behind the section in which finish was called.
  void end() { agreed_in_ = worker_.strategy().completed_sections().generation; }

  // Returns what sum() does: sums of what each said. Throws InvalidArgument where another worker made another call.
  std::vector<double> checked(const std::function<std::vector<double>()>& sum) const;

  // Agrees in a sum of its own. Collective.
  void agree(bool stops);

  // How many made the agreement; some may be lost since.
  double workers() const { return agreed_[mark] / kMark; }
  bool stopping() const { return agreed_[stops_] > 0; }

  // The signal that ends the training for all, or 0.
  int signal() const;

  // After an agreement, of an elastic strategy: workers that were told to end leave while enough others remain; their
  // calls throw Interrupted. Newcomers are taken in. Where too few are left, they wait for newcomers; save() is called
  // before ClusterError is thrown since none have come.
  void change_workers(const std::function<void()>& save);

  // The same of a newcomer, where it finds that the others wait.
  void wait_for_newcomers(const std::function<void()>& save);

 private:
  enum Place { stops_, interrupted, terminated, newcomers, waited, mark };
  static constexpr double kMark = 0x5eed'1d'ea;  // that no other sum is likely to have in its place

  bool is_of_these_workers() const;
  void agree_again();
  std::vector<int> rows_that_leave();
  int rows() const;  // of workers that have one copy of the model together
  bool too_few() const;
  const ElasticOptions& elastic() const { return *worker_.strategy().settings().workers->elastic; }

  TrainingWorker& worker_;
  Recovery& recovery_;
  const SignalGuard& signals_;
  const std::function<const Communicator&()> peers_;
  std::array<double, kSize> agreed_{};
  std::int64_t agreed_in_ = 0;  // the generation
  bool has_waited_ = false;     // the chief, for newcomers, as long as it may
  bool told_to_leave_ = false;  // when this worker last said what it has in it
};

}  // namespace lockstep::train
