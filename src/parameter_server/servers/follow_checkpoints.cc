#include "parameter_server/servers/follow_chief.h"

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_checkpoint.h"
#include "parameter_server/servers/server_reduction.h"
#include "parameter_server/servers/servers.h"
#include "train/callbacks/progress_bar.h"
#include "train/evaluate.h"
#include "train/model_impl.h"

namespace lockstep::servers {
namespace {

constexpr std::chrono::seconds kToReplace(5);

class Evaluator {
 public:
  Evaluator(Model& model, const FitOptions& options, std::int64_t& evaluated_step)
      : model_(model),
        impl_(unwrap(model)),
        servers_(servers_of(unwrap(impl_.strategy)).cluster()),
        options_(options),
        evaluated_step_(evaluated_step) {
    for (const auto& callback : options.callbacks) {
      callback->attach(model, {.epochs = options.epochs, .verbose = options.verbose});
    }
  }

  // Evaluates the last checkpoint, where it is a new one.
  void evaluate_last() {
    const auto path = servers_.last_checkpoint(client_of(*impl_.gradients));
    if (!path) return;
    try {
      checkpoint::ShardedArchive checkpoint(*path);
      const auto step = parameter_server::steps_of(checkpoint.main()).end;
      readable_by_.reset();
      if (step == evaluated_step_) return;
      load(checkpoint.whole());
      evaluated_step_ = step;
    } catch (const IoError& error) {
      return warn_if_it_stays(error.what());
    }
    evaluate();
  }

 private:
  // A checkpoint that cannot be read may be one that is being replaced.
  void warn_if_it_stays(const char* why) {
    if (!readable_by_) readable_by_ = Deadline::after(kToReplace);
    if (!readable_by_->passed() || std::exchange(warned_, true)) return;
    log_warning(text("the evaluator cannot read the last checkpoint (does its host see the folder?): ", why));
  }

  void load(const Archive& archive) {
    impl_.state.weights().load(archive, "")();
    impl_.gradients->updater().set_iterations(archive.integer("optimizer/iterations"));
  }

  void evaluate() {
    for (const auto& callback : options_.callbacks) callback->on_test_begin();
    const auto logs = train::evaluate_values(model_, *options_.validation_data, options_.validation_steps);
    if (options_.verbose != 0) train::print_line(text("checkpoint of step ", evaluated_step_), logs);
    for (const auto& callback : options_.callbacks) callback->on_test_end(logs);
  }

  Model& model_;
  ModelImpl& impl_;
  const parameter_server::ServerCluster& servers_;
  const FitOptions& options_;
  std::int64_t& evaluated_step_;
  std::optional<Deadline> readable_by_;  // while the last checkpoint cannot be read
  bool warned_ = false;
};

}  // namespace

void follow_checkpoints(Model& model, const FitOptions& options, std::int64_t call, std::int64_t& evaluated_step,
                        const train::SignalGuard& signals) {
  if (!options.validation_data) {
    log_warning("fit: this process is an evaluator, and there are no validation_data");
    return;
  }
  Evaluator evaluator(model, options, evaluated_step);
  auto& servers = servers_of(unwrap(model.strategy())).cluster();
  const auto interrupted = [&] { return signals.received() != 0; };
  const auto outcome = [&](auto& chief, Deadline deadline) { return chief.outcome(call, deadline); };
  const auto goes_on = [&] { return !interrupted() && !servers.ask_chief(outcome, interrupted); };
  while (goes_on()) evaluator.evaluate_last();
  if (signals.received() == 0) evaluator.evaluate_last();
}

}  // namespace lockstep::servers
