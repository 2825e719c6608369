// fit: epochs of steps, with callbacks around them.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "strategy/strategy_impl.h"
#include "train/callbacks/progress_bar.h"
#include "train/evaluate.h"
#include "train/fit_options.h"
#include "train/fit_worker.h"
#include "train/model_impl.h"
#include "train/signal_guard.h"
#include "train/step_source.h"
#include "train/stragglers.h"
#include "train/training.h"

namespace lockstep {
namespace {

bool on_cpu(const std::vector<c10::Device>& devices) {
  return std::all_of(devices.begin(), devices.end(), [](const auto& device) { return device.is_cpu(); });
}

class Fit {
 public:
  Fit(Model& model, const Dataset& data, const FitOptions& options)
      : model_(model),
        impl_(unwrap(model)),
        options_(options),
        data_(train::weighed(impl_, data, options).keeping_first()),
        signals_(options.handle_signals),
        worker_(impl_, "fit", [this] { become_chief(); }),
        training_(train::Training::of(worker_, &signals_)),
        computes_alone_(on_cpu(unwrap(impl_.strategy).replicas().devices()) && !impl_.topology.is_split) {
    impl_.fit.training = training_.get();
  }

  ~Fit() {
    for (const auto& callback : callbacks_) callback->detach();
    impl_.state.callbacks.clear();
    impl_.fit.training = nullptr;
  }
  Fit(const Fit&) = delete;
  Fit& operator=(const Fit&) = delete;

  History run() {
    impl_.state.data_epochs = std::max<std::int64_t>(impl_.state.data_epochs, options_.initial_epoch);
    impl_.state.progress = {.epoch = options_.initial_epoch, .position = {.epoch = impl_.state.data_epochs}};
    impl_.fit.stopping = impl_.fit.agreed_to_stop = impl_.fit.out_of_data = false;
    unwrap(impl_.strategy).workers().abort_on_error(peers(), [this] {
      build_for_first_batch();
      compare();
      steps_ = impl_.lead->steps(data_, options_);
      attach_callbacks();
      train();
    });
    if (options_.steps_per_epoch > 0) ++impl_.state.data_epochs;  // all epochs of this fit came from one epoch of data
    return progress().history;
  }

 private:
  bool begin() {
    take_part();
    each([](Callback& callback) { callback.on_train_begin(); });  // BackupAndRestore changes the progress in it
    agree();
    train::compare_states(model_);
    return true;
  }

  // Does what `begin` does, for a newcomer to a fit that runs. False where the fit has ended.
  bool join() {
    each([](Callback& callback) { callback.on_join(); });
    if (!take_part()) return false;
    if (worker_.waits) training_->wait_for_newcomers([this] { save_at_interrupt(); });
    return true;
  }

  bool take_part() {
    return training_->take_part([this] { return train::describe_member(impl_, data_, options_); });
  }

  void train() {
    for (bool begun = false, ended = false; !ended;) {
      try {
        if (!std::exchange(begun, true) && !(impl_.topology.is_newcomer() ? join() : begin())) return;
        // A training that was interrupted after a callback asked it to stop in the middle of an epoch still finishes
        // that epoch.
        while (progress().epoch < options_.epochs && (!stopping() || progress().batch > 0)) run_epoch();
        each([](Callback& callback) { callback.on_train_end(); });
        ended = true;
      } catch (const StateLost& error) {
        restore_after(error.what());
      }
    }
    training_->end();
  }

  // Goes back to the last checkpoint of a callback.
  void restore_after(const std::string& loss) {
    std::function<void()> change;
    for (bool found = false; !found;) {
      const auto read = [&] {
        change = nullptr;
        for (std::size_t i = 0; i < callbacks_.size() && !change; ++i) change = callbacks_[i]->on_state_lost();
        workers().any(false);  // where it returns on one worker, all have read it
        return train::Training::Numbers();
      };
      try {
        training_->run(read, [&](const auto&) {
          if (change) change();
        });
        found = true;
        if (!change) break;
        impl_.fit.agreed_to_stop = false;
        ended_epoch_.reset();
        agree();
      } catch (const StateLost&) {  // the loop tries again
        found = false;
      }
    }
    if (!change) throw StateLost(loss + ". BackupAndRestore makes checkpoints to which fit can go back");
    if (!impl_.strategy.is_chief()) return;
    log_warning(text("fit: ", loss, "; it goes on from the last checkpoint, in epoch ", progress().epoch + 1, " after ",
                     progress().batch, " steps"));
  }

  train::FitProgress& progress() const { return impl_.state.progress; }

  bool stopping() const { return impl_.stops(); }
  void agree() {
    training_->agree(impl_.fit.stopping);
    impl_.fit.agreed_to_stop = training_->stopping();
  }
  const Communicator& workers() const { return impl_.topology.all; }
  const Communicator& peers() const { return impl_.topology.peers; }

  void build_for_first_batch() {
    impl_.build_for(data_, "fit");
    if (options_.validation_data) validation_data_ = options_.validation_data->keeping_first();
    impl_.check_on_all([this] {
      impl_.follow_requires_grad();
      impl_.require_trainable();
      train::require_validation_data(validation_data_, options_, unwrap(impl_.strategy).local_replicas());
    });
    impl_.gradients->prepare();
    impl_.state.tracker->reset();
    train::warn_of_copies(impl_);
  }

  void compare() {
    const auto all = [this] {
      train::compare_fits(impl_, data_, options_);
      return train::Training::Numbers();
    };
    training_->run(all, [](const auto&) {});
  }

  void attach_callbacks() {
    FitPlan plan{.epochs = options_.epochs, .steps = steps_->steps_of_an_epoch(), .verbose = options_.verbose};
    if (plan.verbose < 0) plan.verbose = train::is_terminal() ? 1 : 2;
    plan.validates = options_.validation_data.has_value();
    if (plan.verbose > 0) callbacks_.push_back(train::ProgressBar());
    callbacks_.insert(callbacks_.end(), options_.callbacks.begin(), options_.callbacks.end());
    std::stable_sort(callbacks_.begin(), callbacks_.end(),
                     [](const AnyCallback& a, const AnyCallback& b) { return a->order() < b->order(); });
    for (const auto& callback : callbacks_) callback->attach(model_, plan);
    impl_.state.callbacks = options_.callbacks;  // in the user's order, by which checkpoints identify them
  }

  void run_epoch() {
    const int epoch = progress().epoch;
    model_.module().train();
    each([&](Callback& callback) { callback.on_epoch_begin(epoch); });
    follow_requires_grad();
    steps_->begin_epoch();
    if (stopping()) steps_->stop();
    while (steps_->next([this] { return signals_.received() != 0; })) run_batch();
    if (steps_->was_interrupted()) throw_if_interrupted();
    if (progress().batch < options_.steps_per_epoch && !stopping()) stop_for_lack_of_data();
    if (progress().batch == 0 && !stopping()) throw InvalidArgument("fit: the data set yielded no batch");
    if (progress().batch == 0) return;  // the fit was stopped before its first step
    finish_epoch(epoch);
    throw_if_interrupted();
  }

  void run_batch() {
    const auto index = progress().batch;
    each([&](Callback& callback) { callback.on_train_batch_begin(index); });
    make_step();
    auto logs = impl_.state.tracker->logs();
    steps_->add_to(logs);
    impl_.fit.batches_of_call = progress().batch - index;
    each([&](Callback& callback) { callback.on_train_batch_end(progress().batch - 1, logs); });
    training_->change_workers([this] { save_at_interrupt(); });
    throw_if_interrupted();
    if (stopping()) steps_->stop();
  }

  void make_step() {
    const auto sum = [this](std::span<const double> news) { return steps_->sum(news); };
    const auto train = [&] {
      if (!training_->updated()) steps_->train();
      training_->updated() = true;
      return training_->sum_with_agreement(impl_.fit.stopping, seconds_of_workers(), sum);
    };
    training_->run(train, [this](const auto& sums) {
      const auto of_step = training_->take_agreement(sums);
      steps_->count(of_step);
      impl_.fit.agreed_to_stop = training_->stopping();
      look_for_stragglers(of_step);
    });
  }

  // Returns the seconds that this worker has computed since its last step, among zeros: [rank].
  std::vector<double> seconds_of_workers() {
    std::vector<double> seconds(static_cast<std::size_t>(peers().size()));
    const auto& times = impl_.times;
    const double computed = times.input + times.forward + times.backward;
    seconds[static_cast<std::size_t>(peers().rank())] = computed - std::exchange(computed_, computed);
    return seconds;
  }

  // `sums` ends with the workers' seconds.
  void look_for_stragglers(std::span<const double> sums) {
    if (!impl_.strategy.is_chief() || !computes_alone_) return;
    const auto workers = static_cast<std::size_t>(std::lround(training_->workers()));
    const auto said = stragglers_.count(sums.last(workers));
    if (said.empty()) return;
    log_warning(text("fit: ", said, training_->launchers_rank(stragglers_.named())));
  }

  // The earlier chief is lost, at the end of an epoch perhaps before its callbacks were called.
  void become_chief() {
    for (const auto& callback : callbacks_) {
      if (callback->only_on_chief()) callback->on_become_chief();
    }
    for (std::size_t i = 0; ended_epoch_ && i < called_; ++i) {
      if (callbacks_[i]->only_on_chief()) callbacks_[i]->on_epoch_end(ended_epoch_->first, ended_epoch_->second);
    }
    for (const auto& callback : callbacks_) {
      if (callback->only_on_chief()) callback->on_epoch_begin(progress().epoch);
    }
  }

  // Call it after a whole step or epoch.
  void throw_if_interrupted() {
    const int signal = training_->signal();
    if (signal == 0) return;
    training_->end();
    save_at_interrupt();
    throw Interrupted(signal);
  }

  // Lets every callback save, also when another one fails to save.
  void save_at_interrupt() {
    meet();
    each([](Callback& callback) {
      try {
        callback.on_interrupt();
      } catch (const StateLost&) {  // the next callback must not save the rest
        throw;
      } catch (const std::exception& error) {
        log_warning(text("a callback could not save at the interruption: ", error.what()));
      }
    });
  }

  // Workers that train by themselves bring their variables together.
  void meet() {
    if (impl_.gradients->outer_step() == nullptr) return;
    const auto act = [this] {
      impl_.gradients->meet();
      return train::Training::Numbers();
    };
    training_->run(act, [](const auto&) {});
  }

  void stop_for_lack_of_data() {
    if (progress().batch == 0 && progress().history.epoch.empty()) throw InvalidArgument("fit: the data set is empty");
    log_warning(text("fit: the data set ended after ", progress().batch, " of ", options_.steps_per_epoch,
                     " steps of epoch ", progress().epoch + 1, "; call repeat() on it to train longer"));
    impl_.fit.stopping = impl_.fit.agreed_to_stop = impl_.fit.out_of_data = true;
  }

  // Reads requires_grad again: a callback may have changed it.
  void follow_requires_grad() {
    const auto before = impl_.frozen;
    impl_.follow_requires_grad();
    steps_->require_known_trainable(impl_.frozen != before);
  }

  void finish_epoch(int epoch) {
    meet();
    auto logs = impl_.state.tracker->logs();
    steps_->add_to(logs);
    if (options_.validation_data && (epoch + 1) % options_.validation_freq == 0) {
      const auto result = validate();
      for (const auto& [name, value] : result) logs.set("val_" + name, value);
    }
    each([&](Callback& callback) { callback.on_epoch_logs(epoch, logs); });
    auto& history = progress().history;
    history.epoch.push_back(epoch);
    for (const auto& [name, value] : logs) history.history[name].push_back(value);

    // A checkpoint that is saved from here on continues with the next epoch.
    impl_.state.tracker->reset();
    progress().epoch = epoch + 1;
    progress().batch = 0;
    if (options_.steps_per_epoch == 0) {
      progress().position = {.epoch = ++impl_.state.data_epochs};
      progress().examples = 0;
    }
    ended_epoch_ = {epoch, logs};
    each([&](Callback& callback) { callback.on_epoch_end(epoch, logs); });
    agree();
    ended_epoch_.reset();
    training_->change_workers([this] { save_at_interrupt(); });
  }

  Logs validate() {
    each([](Callback& callback) { callback.on_test_begin(); });
    Logs logs;
    const auto evaluate = [&] {
      impl_.execution->fetch_for_forward();
      logs = train::evaluate_values(model_, *validation_data_, options_.validation_steps);
      std::vector<double> values;
      for (const auto& [name, value] : logs) values.push_back(value);
      return values;
    };
    training_->run(evaluate, [&](const auto& values) {
      if (logs.empty())
        logs = impl_.state.tracker->logs();  // for the names: another worker has completed the evaluation
      std::size_t i = 0;
      for (const auto& [name, value] : Logs(logs)) logs.set(name, values.at(i++));
    });
    each([&](Callback& callback) { callback.on_test_end(logs); });
    return logs;
  }

  template <class Call>
  void each(const Call& call) {
    for (called_ = 0; called_ < callbacks_.size(); ++called_) {
      const auto& callback = callbacks_[called_];
      if (callback->only_on_chief() && !impl_.strategy.is_chief()) continue;
      try {
        call(*callback.operator->());
      } catch (const std::exception& error) {
        if (!training_->goes_on_after(error, train::name_of_type(*callback.operator->()))) throw;
      }
    }
  }

  Model& model_;
  ModelImpl& impl_;
  const FitOptions& options_;
  const Dataset data_;
  std::optional<Dataset> validation_data_;  // keeps its first element
  train::SignalGuard signals_;
  train::FitWorker worker_;
  const std::unique_ptr<train::Training> training_;
  train::Stragglers stragglers_;
  double computed_ = 0;                 // seconds that were computed until the last step
  const bool computes_alone_;           // without waiting for a GPU, or for other workers in forward and backward
  std::vector<AnyCallback> callbacks_;  // in the order of their calls
  std::size_t called_ = 0;              // callbacks called in the current call of all, or in the last one
  std::optional<std::pair<int, Logs>> ended_epoch_;  // some worker may lack its on_epoch_end calls
  std::unique_ptr<train::StepSource> steps_;
};

}  // namespace

History Model::fit(const Dataset& data, const FitOptions& options) {
  impl_->require_compiled("fit");
  if (impl_->fit.training != nullptr)
    throw InvalidArgument("fit: this model is in a fit already; a callback of it cannot call fit");
  impl_->check_on_all([&] { train::check_fit_options(data, options); });
  impl_->lead->prepare_fit(data);
  return impl_->lead->call(
      "fit", [&] { return Fit(*this, data, options).run(); },
      [&](std::int64_t call) { return impl_->lead->follow_fit(*this, data, options, call); });
}

}  // namespace lockstep
