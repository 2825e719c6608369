// fit: epochs of steps, with callbacks around them.
#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/error.h"
#include "train/callbacks/progress_bar.h"
#include "train/model_impl.h"
#include "train/signal_guard.h"

namespace lockstep {
namespace {

void check(const FitOptions& options) {
  const auto require = [](bool holds, const char* name, std::int64_t value, const char* allowed) {
    if (!holds) throw InvalidArgument(text("fit: ", name, " is ", value, "; it must be ", allowed));
  };
  require(options.epochs >= 1, "epochs", options.epochs, "at least 1");
  require(options.initial_epoch >= 0, "initial_epoch", options.initial_epoch, "0 or more");
  require(options.steps_per_epoch >= 0, "steps_per_epoch", options.steps_per_epoch, "0 (the whole data set) or more");
  require(options.validation_steps >= 0, "validation_steps", options.validation_steps, "0 (all) or more");
  require(options.validation_freq >= 1, "validation_freq", options.validation_freq, "at least 1");
  require(options.verbose >= -1 && options.verbose <= 2, "verbose", options.verbose, "-1 (automatic), 0, 1 or 2");
}

// Multiplies the batch's sample weights by the weights of its labels.
Example weigh_by_class(Example batch, const std::map<std::int64_t, double>& class_weight) {
  if (!batch.y.defined()) throw InvalidArgument("fit: class_weight needs data with labels");
  const bool one_hot = batch.y.dim() > 1 && batch.y.size(-1) > 1;
  const auto labels = (one_hot ? batch.y.argmax(-1) : batch.y.flatten()).to(at::kLong).contiguous();
  auto weights = at::ones({labels.numel()}, at::kFloat);
  for (std::int64_t i = 0; i < labels.numel(); ++i) {
    const auto found = class_weight.find(labels.const_data_ptr<std::int64_t>()[i]);
    if (found != class_weight.end()) weights.mutable_data_ptr<float>()[i] = static_cast<float>(found->second);
  }
  batch.weight = batch.weight.defined() ? batch.weight * weights.view_as(batch.weight) : weights;
  return batch;
}

class Fit {
 public:
  Fit(Model& model, const Dataset& data, const FitOptions& options)
      : model_(model), impl_(*model.impl()), options_(options), data_(data), signals_(options.handle_signals) {
    if (!options.class_weight.empty()) {
      data_ = data_.map(
          [weights = options.class_weight](Example batch) { return weigh_by_class(std::move(batch), weights); });
    }
  }

  History run() {
    impl_.progress = {.epoch = options_.initial_epoch, .position = {.epoch = options_.initial_epoch}};
    impl_.stopping = false;
    build_for_first_batch();
    attach_callbacks();
    each([](Callback& callback) { callback.on_train_begin(); });  // BackupAndRestore changes the progress here
    while (progress().epoch < options_.epochs && !impl_.stopping) run_epoch();
    each([](Callback& callback) { callback.on_train_end(); });
    impl_.progress.callbacks.clear();
    return progress().history;
  }

 private:
  FitProgress& progress() { return impl_.progress; }

  void build_for_first_batch() {
    if (impl_.parameters == nullptr) {
      const auto first = data_.iterate().next();
      if (!first) throw InvalidArgument("fit: the data set is empty");
      impl_.build(*first);
    }
    impl_.tracker->reset();
  }

  void attach_callbacks() {
    FitPlan plan{.epochs = options_.epochs, .steps = steps_of_an_epoch(), .verbose = options_.verbose};
    if (plan.verbose < 0) plan.verbose = ::isatty(STDOUT_FILENO) == 1 ? 1 : 2;
    auto& callbacks = progress().callbacks;
    if (plan.verbose > 0) callbacks.push_back(ProgressBar());
    callbacks.insert(callbacks.end(), options_.callbacks.begin(), options_.callbacks.end());
    // What saves the state of all the others comes after them.
    std::stable_partition(callbacks.begin(), callbacks.end(),
                          [](const AnyCallback& callback) { return !callback->saves_state(); });
    for (const auto& callback : callbacks) callback->attach(model_, plan);
  }

  std::int64_t steps_of_an_epoch() const {
    if (options_.steps_per_epoch > 0) return options_.steps_per_epoch;
    return std::max<std::int64_t>(-1, data_.cardinality());
  }

  void run_epoch() {
    const int epoch = progress().epoch;
    model_.module().train();
    each([&](Callback& callback) { callback.on_epoch_begin(epoch); });
    auto& iterator = open_data();
    while (!impl_.stopping && (options_.steps_per_epoch == 0 || progress().batch < options_.steps_per_epoch)) {
      const auto before = std::chrono::steady_clock::now();
      auto batch = iterator.next();
      impl_.times.input += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
      if (!batch) break;
      run_batch(*batch, iterator.position());
    }
    if (progress().batch == 0) throw InvalidArgument(text("fit: the data set yielded no batch in epoch ", epoch));
    if (progress().batch < options_.steps_per_epoch && !impl_.stopping) stop_for_lack_of_data();
    finish_epoch(epoch);
  }

  // With steps_per_epoch, one iterator serves all epochs.
  DistributedIterator& open_data() {
    if (!iterator_ || options_.steps_per_epoch == 0) {
      iterator_.emplace(impl_.strategy.distribute(data_.prefetch(kPrefetchedBatches)).iterate(progress().position));
    }
    return *iterator_;
  }

  void run_batch(PerReplica<Example>& batch, Position position_after) {
    const auto index = progress().batch;
    each([&](Callback& callback) { callback.on_train_batch_begin(index); });
    impl_.train_batch(batch, *impl_.tracker);
    progress().batch = index + 1;
    progress().position = position_after;
    const auto logs = impl_.tracker->logs();
    each([&](Callback& callback) { callback.on_train_batch_end(index, logs); });
    if (const int signal = signals_.received(); signal != 0) {
      each([](Callback& callback) { callback.on_interrupt(); });
      throw Interrupted(signal);
    }
  }

  void stop_for_lack_of_data() {
    log_warning(text("fit: the data set ended after ", progress().batch, " of ", options_.steps_per_epoch,
                     " steps of epoch ", progress().epoch, "; call repeat() on it to train longer"));
    impl_.stopping = true;
  }

  void finish_epoch(int epoch) {
    auto logs = impl_.tracker->logs();
    if (options_.validation_data && (epoch + 1) % options_.validation_freq == 0) {
      const auto result = validate();
      for (const auto& [name, value] : result) logs.set("val_" + name, value);
    }
    auto& history = progress().history;
    history.epoch.push_back(epoch);
    for (const auto& [name, value] : logs) history.history[name].push_back(value);

    // From here on the next epoch is what a checkpoint would go on with.
    impl_.tracker->reset();
    progress().epoch = epoch + 1;
    progress().batch = 0;
    if (options_.steps_per_epoch == 0) progress().position = {.epoch = epoch + 1};
    each([&](Callback& callback) { callback.on_epoch_end(epoch, logs); });
  }

  Logs validate() {
    each([](Callback& callback) { callback.on_test_begin(); });
    const auto logs = model_.evaluate(*options_.validation_data, {.steps = options_.validation_steps});
    each([&](Callback& callback) { callback.on_test_end(logs); });
    return logs;
  }

  template <class Call>
  void each(const Call& call) {
    for (const auto& callback : progress().callbacks) call(*callback.operator->());
  }

  static constexpr std::int64_t kPrefetchedBatches = 2;

  Model& model_;
  ModelImpl& impl_;
  const FitOptions& options_;
  Dataset data_;
  SignalGuard signals_;
  std::optional<DistributedIterator> iterator_;
};

}  // namespace

History Model::fit(const Dataset& data, const FitOptions& options) {
  impl_->require_compiled("fit");
  check(options);
  return Fit(*this, data, options).run();
}

}  // namespace lockstep
