// A model's part in its strategy's job.
#pragma once

#include <functional>
#include <string>

#include "strategy/replicated_state.h"
#include "train/model_impl.h"
#include "train/training_worker.h"

namespace lockstep::train {

class FitWorker final : public TrainingWorker {
 public:
  // `what`: "fit". `become_chief`: called where this worker has become the chief.
  FitWorker(ModelImpl& impl, const std::string& what, std::function<void()> become_chief)
      : TrainingWorker(unwrap(impl.strategy), what), impl_(impl), become_chief_(std::move(become_chief)) {}

  const Communicator& peers() const override { return impl_.topology.peers; }
  std::int64_t steps() const override { return impl_.state.steps; }
  void set_steps(std::int64_t steps) override { impl_.state.steps = steps; }
  std::int64_t updates() const override { return impl_.gradients->decided_steps(); }
  bool leaves_in_turn() const override { return impl_.gradients->divides_state(); }
  void use_new_group() override { impl_.gradients->regroup(); }
  void come_together() override { impl_.gradients->come_together(); }
  void skip_update() override { impl_.gradients->skip_step(); }

 private:
  Trackable update() override { return strategy::update_of(impl_.parameters, impl_.gradients); }
  Trackable part() override { return strategy::newcomers_part_of(impl_.parameters, impl_.gradients); }
  Trackable common() override { return impl_.state.of_fit(); }
  void on_same_section(bool updated) override { impl_.state.tracker->take_over(rank(), updated); }
  void on_become_chief() override { become_chief_(); }

  ModelImpl& impl_;
  const std::function<void()> become_chief_;
};

}  // namespace lockstep::train
