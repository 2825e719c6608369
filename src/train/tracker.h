// The loss and metrics of an epoch, summed over steps and the replicas of all workers.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/train/logs.h"
#include "lockstep/train/model.h"

namespace lockstep::train {

// The results of one replica's step: sums over its part of the batch.
struct StepResult {
  double loss_sum = 0;
  double divisor = 0;
  std::int64_t examples = 0;
};

// Each replica's thread calls `update` for itself; everything else is called while no replica runs.
class Tracker {
 public:
  // `replicas`: of this process.
  Tracker(const CompileOptions& compiled, int replicas, Communicator workers);

  // Adds a replica's part of a batch.
  void update(int replica, const Example& part, const Tensor& outputs);

  // Adds the replicas' results of a batch, after each replica's `update`. The epoch's loss is the mean of the batches'
  // losses, weighted by batch size. Collective over the workers.
  void add_batch(const PerReplica<StepResult>& results) { count_batch(sum_batch(&results, {})); }

  // Do what add_batch does, in two halves. sum_batch returns the sums of all workers, with the sums of `news` after
  // them; it is collective. `results`: null where this worker has none of the batch.
  std::vector<double> sum_batch(const PerReplica<StepResult>* results, std::span<const double> news) const;
  void count_batch(std::span<const double> sums);

  // Call it after workers were lost, with their sums of the epoch: `rank` 0 has these from now on. `counts`: this
  // worker's `update`s of the batch that has not been counted stay.
  void take_over(int rank, bool counts);

  // Two halves for a batch whose sums others compute: sums_of returns what this process computed since `reset`;
  // add_sums adds the sum over all processes.
  std::vector<double> sums_of(const PerReplica<StepResult>& results) const;
  void add_sums(std::span<const double> sums);

  double batch_loss() const { return batch_loss_; }  // that of the last one

  void reset();
  Logs logs() const;

  // Save the sums of all workers; and each replica's, which is collective, so that a training that goes on adds them up
  // in the same order. `load` changes nothing until the function that it returns is called. It takes an archive with or
  // without the replicas' sums.
  void save(Archive& archive, const std::string& prefix) const;
  void save_replicas(Archive& archive, const std::string& prefix) const;
  std::function<void()> load(const Archive& archive, const std::string& prefix);

 private:
  std::vector<double> local_sums() const;
  void add_loss(double loss, double divisor, double examples);

  const Communicator workers_;
  const bool divide_;  // the loss is a mean
  std::vector<Metric> metrics_;
  std::size_t first_weighted_;                    // metrics_ from here on use sample weights
  std::vector<std::vector<MetricState>> states_;  // [replica][metric]
  std::vector<double> sums_;                      // of all metrics and workers, after the last batch
  std::vector<double> counted_;                   // local_sums() after the last batch
  double loss_sum_ = 0;
  double examples_ = 0;
  double batch_loss_ = 0;
};

// The times of a step's parts. Adds the time since it was made, or since the last call, to one of StepTimes' sums.
class Lap {
 public:
  void add_to(double& seconds) {
    const auto now = std::chrono::steady_clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep::train
