// Horovod's callbacks for fit. Include lockstep/horovod.h.
#pragma once

#include <cstdint>

#include "lockstep/train/callback.h"

namespace lockstep::horovod {

// When training begins, rank `root_rank` broadcasts weights, buffers, the optimizer's state and the progress of the
// training. So a checkpoint that this rank alone restores (BackupAndRestore) applies to all ranks, except for what
// other callbacks keep (EarlyStopping's patience), which is not sent. Each rank has random numbers of its own, derived
// from root's.
class BroadcastGlobalVariablesCallback : public Callback {
 public:
  explicit BroadcastGlobalVariablesCallback(int root_rank = 0) : root_rank_(root_rank) {}
  void on_train_begin() override;
  Order order() const override { return Order::broadcasts_state; }

 private:
  int root_rank_;
};
using BroadcastGlobalVariablesHook = BroadcastGlobalVariablesCallback;  // as Estimator's users know it

// At the end of an epoch its logs become their means over the ranks, for the other callbacks and the history.
class MetricAverageCallback : public Callback {
 public:
  void on_epoch_logs(int epoch, Logs& logs) override;
};

// Raises the learning rate from initial_lr / size() to initial_lr over the first epochs, batch by batch, and leaves it
// there. Goyal et al., "Accurate, large minibatch SGD", 2017.
struct LearningRateWarmupOptions {
  double initial_lr = 0;  // what is reached: one process's rate times size(), for most
  double warmup_epochs = 5;
  std::int64_t steps_per_epoch = 0;  // 0: as many as the data set tells
  int verbose = 0;                   // 1: prints the rate that was reached
};
class LearningRateWarmupCallback : public Callback {
 public:
  // Throws InvalidArgument for options that are not above 0.
  explicit LearningRateWarmupCallback(const LearningRateWarmupOptions& options);
  void on_train_begin() override;
  void on_epoch_begin(int epoch) override { epoch_ = epoch; }
  void on_train_batch_begin(std::int64_t batch) override;
  void on_epoch_end(int epoch, const Logs& logs) override;

 private:
  LearningRateWarmupOptions options_;
  std::int64_t steps_ = 0;  // an epoch
  int epoch_ = 0;
};

}  // namespace lockstep::horovod
