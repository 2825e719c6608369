#include "tests/drawn_fit_reference.h"

#include <algorithm>

namespace lockstep {

void PlainFits::fit(const DrawnFit& fit, int number) {
  const auto set_trained = [&](int parameter, bool trained) {
    if (parameter >= 0)
      parameters_[static_cast<std::size_t>(parameter) % parameters_.size()].second.set_requires_grad(trained);
  };
  set_trained(fit.freezes, false);
  set_trained(fit.unfreezes, true);
  if (fit.compiles_anew) {
    states_.clear();
    iterations_ = 0;
    override_.reset();
  }
  if (on_.kind == DrawnStrategy::servers) spread(averaged(), buffers_.size());
  const bool restores = program_.phases[static_cast<std::size_t>(phase_)].from == DrawnPhase::backup;
  if (!restores) {
    batches_.reset();
    stopped_ = false;
    ended_epochs_ = 0;
  }
  monitor_ = {};
  bool stopping = stopped_, out_of_data = false;
  for (; ended_epochs_ < fit.epochs && !stopping && !out_of_data; ++ended_epochs_) {
    if (fit.halves_rate) override_ = rate() / 2;
    Epoch sums;
    out_of_data = !train_epoch(fit, sums, stopping);
    if (sums.examples == 0) break;
    if (end_epoch(fit, number, ended_epochs_, sums)) stopping = true;
  }
  if (fit.early_stopping && fit.restores_best && !monitor_.best_weights.empty()) load(monitor_.best_weights);
  stopped_ = stopping;
  if (program_.data.steps_per_epoch > 0) ++data_epochs_;
  const int from = restores ? 0 : phase_;
  if (fit.backs_up) expected_.files[text("backup_", from, "_", number, "/backup")] = weights();
  Snapshot end{weights(), {}};
  evaluate_into(end.results);
  expected_.snapshots[{phase_, number, kAfterFit}] = end;
}

// False where the data end before the epoch does.
bool PlainFits::train_epoch(const DrawnFit& fit, Epoch& sums, bool& stopping) {
  const auto steps = program_.data.steps_per_epoch;
  if (steps == 0 || !batches_) batches_.emplace(indices_.iterate({data_epochs_, 0}));
  std::int64_t batch = 0;
  // Several workers agree on it in the small reduction of their next step.
  bool asked = false;
  const bool is_agreed = on_.workers_ > 1;
  while (!stopping) {
    const auto most = steps > 0 ? std::min(program_.steps_per_execution, steps - batch) : program_.steps_per_execution;
    const auto before = batch;
    while (batch - before < most) {
      const auto next = batches_->next();
      if (!next) break;
      step(next->x, sums);
      ++batch;
    }
    if (batch == before) break;
    if (asked) stopping = true;
    if (fit.sets_rate_at >= 0 && batch > fit.sets_rate_at) override_ = 0.003;
    if (fit.stop_batch >= 0 && batch > fit.stop_batch) (is_agreed ? asked : stopping) = true;
  }
  stopping = stopping || asked;
  if (steps == 0) ++data_epochs_;
  return batch >= steps || stopping;
}

// True where a callback stops the training then.
bool PlainFits::end_epoch(const DrawnFit& fit, int number, int epoch, const Epoch& sums) {
  Snapshot now{weights(), {}};
  const auto name = [&](const char* what) { return text(what, "_", phase_, "_", number); };
  const auto of_epoch = [&](const char* what) { return text(name(what), "_", epoch + 1); };
  const auto number_of = [](double value) { return at::scalar_tensor(value, at::kDouble); };
  auto monitored = sums.loss / sums.examples;
  now.results["loss"] = number_of(monitored);
  if (program_.precision == DrawnPrecision::float64) now.results["accuracy"] = number_of(sums.right / sums.labels);
  if (program_.data.validation > 0) {
    monitored = evaluate();
    now.results["val_loss"] = number_of(monitored);
  }
  if (fit.evaluates) evaluate_into(now.results);
  expected_.snapshots[{phase_, number, epoch}] = now;

  auto& files = expected_.files;
  if (fit.saves_weights) files[of_epoch("weights")] = now.weights;
  if (fit.best_only && (!monitor_.best_saved || monitored < *monitor_.best_saved)) {
    monitor_.best_saved = monitored;
    files[name("best")] = now.weights;
  }
  bool stops = epoch == fit.stop_epoch;
  if (fit.early_stopping) {
    const bool better = !monitor_.best || monitored < *monitor_.best;
    ++monitor_.wait;
    if (better) {
      monitor_.best = monitored;
      monitor_.best_weights = now.weights;
      monitor_.wait = 0;
    } else if (monitor_.wait >= fit.patience && epoch > 0) {
      stops = true;
    }
  }
  if (fit.saves_itself) files[of_epoch("own_weights")] = files[of_epoch("own_full")] = now.weights;
  if (fit.loads_first && epoch == 0) files[name("first")] = now.weights;
  if (fit.loads_first && epoch == 1) load(files.at(name("first")));
  if (fit.saves_all) files[of_epoch("full")] = weights();
  return stops;
}

}  // namespace lockstep
