// The parts that fit needs: an optimizer whose gradients are reduced over the ranks, and the callbacks.
#include <ATen/ops/from_blob.h>

#include <iostream>

#include "base/hash.h"
#include "base/text.h"
#include "checkpoint/state.h"
#include "front_ends/horovod/operations.h"
#include "front_ends/horovod/session.h"
#include "lockstep/horovod.h"
#include "lockstep/train/model.h"
#include "train/model_impl.h"

namespace lockstep::horovod {
namespace {

OptimizerOptions with_ranks(const Optimizer& inner, const FitOptimizerOptions& options) {
  check_gradient_op(options.op);
  const auto session = Session::current();
  auto all = inner.options();
  if (session->size() == 1) return all;
  const auto ranks = session->split(text("DistributedOptimizer for fit (", name_of(options.op), ", compression ",
                                         static_cast<int>(options.compression), ")"));
  all.gradient_ranks =
      GradientRanks{.ranks = ranks, .sum = options.op == Sum, .gradient_dtype = sent_dtype(options.compression)};
  return all;
}

}  // namespace

DistributedOptimizer<Optimizer>::DistributedOptimizer(const Optimizer& inner, const FitOptimizerOptions& options)
    : Optimizer(inner.shared_rule(), with_ranks(inner, options)) {}

void BroadcastGlobalVariablesCallback::on_train_begin() {
  auto& state = unwrap(model()).state;
  const auto all = state.training();
  const auto bytes = broadcast_bytes(
      "BroadcastGlobalVariables", [&] { return checkpoint::print_state(all); }, root_rank_);
  if (rank() == root_rank_) return;
  checkpoint::parse_state("what BroadcastGlobalVariables got", bytes, all)();
  state.seed = mix(state.seed, static_cast<std::uint64_t>(rank()));
}

void MetricAverageCallback::on_epoch_logs(int epoch, Logs& logs) {
  std::vector<double> values;
  std::vector<std::string> names;
  for (const auto& [name, value] : logs) {
    names.push_back(name);
    values.push_back(value);
  }
  const auto mine = at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble);
  const auto means = allreduce(mine, {.name = text("metrics ", lockstep::join(names), " of epoch ", epoch + 1)});
  for (std::size_t i = 0; i < names.size(); ++i) logs.set(names[i], means.const_data_ptr<double>()[i]);
}

LearningRateWarmupCallback::LearningRateWarmupCallback(const LearningRateWarmupOptions& options) : options_(options) {
  require(options.initial_lr > 0, "LearningRateWarmupCallback: initial_lr", options.initial_lr, "above 0");
  require(options.warmup_epochs > 0, "LearningRateWarmupCallback: warmup_epochs", options.warmup_epochs, "above 0");
  require(options.steps_per_epoch >= 0, "LearningRateWarmupCallback: steps_per_epoch", options.steps_per_epoch,
          "0 (as many as the data set tells) or more");
}

void LearningRateWarmupCallback::on_train_begin() {
  steps_ = options_.steps_per_epoch > 0 ? options_.steps_per_epoch : plan().steps;
  if (steps_ < 1) {
    throw InvalidArgument("LearningRateWarmupCallback: the data set does not tell its length; set steps_per_epoch");
  }
}

// Horovod's formula: the rate of a batch is that of its end, so that an epoch ends with a round number.
void LearningRateWarmupCallback::on_train_batch_begin(std::int64_t batch) {
  if (epoch_ >= options_.warmup_epochs) return;
  const double progress = epoch_ + static_cast<double>(batch + 1) / static_cast<double>(steps_);
  const double share = std::min(1.0, progress / options_.warmup_epochs);
  model().set_learning_rate(options_.initial_lr / size() * (share * (size() - 1) + 1));
}

void LearningRateWarmupCallback::on_epoch_end(int epoch, const Logs& /*logs*/) {
  if (options_.verbose > 0 && epoch + 1 >= options_.warmup_epochs && epoch < options_.warmup_epochs) {
    std::cout << "Epoch " << epoch + 1 << ": finished gradual learning rate warmup to " << model().learning_rate()
              << ".\n";
  }
}

}  // namespace lockstep::horovod
