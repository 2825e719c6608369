// Steps that workers make as the chief assigns them; parameter servers have the variables.
#include <algorithm>

#include "lockstep/base/error.h"
#include "strategy/split.h"
#include "train/fit_options.h"
#include "train/local_state.h"
#include "train/model_impl.h"
#include "train/step_source.h"

namespace lockstep::train {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(200);

class AssignedSteps final : public StepSource {
 public:
  AssignedSteps(ModelImpl& impl, const Dataset& data, const FitOptions& options)
      : impl_(impl), data_(data), options_(options), coordinator_(impl.servers()->coordinator()) {
    const auto policy = data.options().auto_shard_policy;
    if (policy == AutoShardPolicy::file || policy == AutoShardPolicy::off) {
      throw InvalidArgument(
          "fit: with parameter servers the chief gives workers batches by their places in the data set, so its "
          "auto_shard_policy must be AutoShardPolicy::automatic or data");
    }
    coordinator_.begin(impl.call, impl.gradients->servers()->model(), impl.servers()->mode(),
                       describe_fit(data, options, impl.replicas()), print_local_state(impl));
  }

  std::int64_t steps_of_an_epoch() override {
    if (options_.steps_per_epoch == FitOptions::kEndless) return -1;
    return options_.steps_per_epoch > 0 ? options_.steps_per_epoch : std::max<std::int64_t>(-1, data_.cardinality());
  }

  void begin_epoch() override {
    set_learning_rate();
    const auto steps = steps_of_an_epoch();
    const auto& progress = impl_.progress;
    coordinator_.open(progress.position.epoch, progress.position.index, steps < 0 ? -1 : steps - progress.batch);
  }

  bool next(const std::function<bool()>& interrupted) override {
    const auto deadline = unwrap(impl_.strategy).deadline();
    while (!coordinator_.step_is_ready(Deadline::after(kBetweenLooks), deadline)) {
      if (interrupted()) return false;
    }
    sums_ = coordinator_.wait_for_step(deadline);
    return sums_.has_value();
  }

  void count(std::span<double>) override {
    impl_.tracker->add_sums(*sums_);
    impl_.gradients->updater().count_step();
    ++impl_.steps;
    ++impl_.progress.batch;
    ++impl_.progress.position.index;
    set_learning_rate();
  }

  void stop() override { coordinator_.stop(); }

 private:
  // What a callback has set holds for the steps that begin from now on.
  void set_learning_rate() { coordinator_.set_learning_rate(impl_.gradients->updater().learning_rate_override()); }

  ModelImpl& impl_;
  const Dataset& data_;
  const FitOptions& options_;
  parameter_server::Coordinator& coordinator_;
  std::optional<std::vector<double>> sums_;  // of the step that finished
};

}  // namespace

std::unique_ptr<StepSource> assigned_steps(ModelImpl& impl, const Dataset& data, const FitOptions& options) {
  return std::make_unique<AssignedSteps>(impl, data, options);
}

}  // namespace lockstep::train
