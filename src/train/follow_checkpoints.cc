#include "train/follow_checkpoints.h"

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_checkpoint.h"
#include "train/callbacks/progress_bar.h"
#include "train/evaluate.h"
#include "train/model_impl.h"

namespace lockstep::train {
namespace {

constexpr std::chrono::seconds kBetweenCheckpoints(1);

class Evaluator {
 public:
  Evaluator(Model& model, const FitOptions& options) : model_(model), impl_(unwrap(model)), options_(options) {
    for (const auto& callback : options.callbacks) {
      callback->attach(model, {.epochs = options.epochs, .verbose = options.verbose});
    }
  }

  // The last checkpoint, if it is a new one.
  void evaluate_last() {
    const auto path = impl_.servers()->last_checkpoint(*impl_.gradients->servers());
    if (!path) return;
    try {
      checkpoint::ShardedArchive checkpoint(*path);
      const auto step = parameter_server::steps_of(checkpoint.main()).end;
      if (step == evaluated_) return;
      load(checkpoint.whole());
      evaluated_ = step;
    } catch (const IoError&) {  // it is being replaced
      return;
    }
    evaluate();
  }

 private:
  void load(const Archive& archive) {
    check_weights(archive, *impl_.parameters);
    ReplicatedModule(impl_.parameters).trackable().load(archive, "")();
    impl_.gradients->updater().set_iterations(archive.integer("optimizer/iterations"));
  }

  void evaluate() {
    for (const auto& callback : options_.callbacks) callback->on_test_begin();
    const auto logs = evaluate_values(model_, *options_.validation_data, options_.validation_steps);
    if (options_.verbose != 0) print_line(text("checkpoint of step ", evaluated_), logs);
    for (const auto& callback : options_.callbacks) callback->on_test_end(logs);
  }

  Model& model_;
  ModelImpl& impl_;
  const FitOptions& options_;
  std::int64_t evaluated_ = -1;  // the step of the last checkpoint that was
};

}  // namespace

void follow_checkpoints(Model& model, const FitOptions& options, std::int64_t call, const SignalGuard& signals) {
  if (!options.validation_data) {
    log_warning("fit: this process is an evaluator, and there are no validation_data");
    return;
  }
  Evaluator evaluator(model, options);
  auto& chief = unwrap(model).servers()->chief();
  const auto goes_on = [&] {
    return signals.received() == 0 && !chief.outcome(call, Deadline::after(kBetweenCheckpoints));
  };
  while (goes_on()) evaluator.evaluate_last();
  if (signals.received() == 0) evaluator.evaluate_last();
}

}  // namespace lockstep::train
