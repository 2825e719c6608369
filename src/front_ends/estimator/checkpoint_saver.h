// The callback of `train` that restores, saves and logs, and ends training where the data end.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/estimator.h"
#include "train/callbacks/event_file.h"

namespace lockstep::estimator {

class CheckpointSaver : public Callback {
 public:
  // `after_save` is called with the step after each checkpoint but the first, by all workers.
  CheckpointSaver(const RunConfig& config, std::function<void()> after_save)
      : config_(config), after_save_(std::move(after_save)) {}

  void on_train_begin() override;
  void on_epoch_begin(int epoch) override;
  void on_train_batch_begin(std::int64_t batch) override;
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_train_end() override;
  void on_interrupt() override { save(); }
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;
  Order order() const override { return Order::restores_state; }

 private:
  using Clock = std::chrono::steady_clock;

  void save();
  bool save_is_due() const;
  void tell();

  const RunConfig config_;
  const std::function<void()> after_save_;
  std::vector<std::string> kept_;  // checkpoints
  std::optional<train::EventFile> events_;
  std::int64_t begin_ = -1, saved_ = -1;  // steps
  Clock::time_point saved_at_, told_at_;
  std::int64_t told_ = 0;
};

}  // namespace lockstep::estimator
