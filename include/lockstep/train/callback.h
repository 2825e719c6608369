// Callbacks of fit. Names, options and order of calls are those of keras.callbacks. All are called by the thread that
// called fit, between steps. An exception of a callback ends fit and comes out of fit.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/train/logs.h"

namespace lockstep {

class Model;

// The plan of a fit, as far as it is known.
struct FitPlan {
  int epochs = 1;
  std::int64_t steps = -1;  // an epoch; -1 when the data set does not tell
  bool validates = false;   // some epochs' logs have val_ values
  int verbose = 0;          // as FitOptions::verbose, resolved
};

// The base of callbacks. Epochs and batches count from 0.
class Callback {
 public:
  virtual ~Callback() = default;

  virtual void on_train_begin() {}
  virtual void on_epoch_begin(int /*epoch*/) {}
  virtual void on_train_batch_begin(std::int64_t /*batch*/) {}
  virtual void on_train_batch_end(std::int64_t /*batch*/, const Logs& /*logs*/) {}
  virtual void on_test_begin() {}
  virtual void on_test_end(const Logs& /*logs*/) {}
  virtual void on_epoch_logs(int /*epoch*/, Logs& /*logs*/) {}  // before on_epoch_end: may change what all get then
  virtual void on_epoch_end(int /*epoch*/, const Logs& /*logs*/) {}
  virtual void on_train_end() {}

  // SIGINT or SIGTERM came: the step is whole and fit is about to throw Interrupted.
  virtual void on_interrupt() {}

  // The callback's state in a full checkpoint: a training that goes on after a restart does as if it had never stopped.
  // Entries begin with `prefix`. As a Trackable's, `load` checks everything, changes nothing, and returns what makes
  // the change and cannot fail: so a checkpoint is loaded whole or not at all.
  virtual void save(Archive& /*archive*/, const std::string& /*prefix*/) const {}
  virtual std::function<void()> load(const Archive& /*archive*/, const std::string& /*prefix*/) {
    return [] {};
  }

  // Callbacks are called in the order of these values, then in the order in which they were given. Those that save the
  // state of others come after them; then those that restore the training's state, that broadcast it to other
  // processes, and that need it as training begins.
  enum class Order { normal, saves_state, restores_state, broadcasts_state, needs_state };
  virtual Order order() const { return Order::normal; }

  // With several workers all call their callbacks, in step and with the same logs: what writes files is for the chief
  // alone. It must not save or evaluate the model, which all workers do together.
  virtual bool only_on_chief() const { return false; }

  // For those that are only_on_chief: the worker that was the chief is lost, and this process is the chief from now on.
  // Where it was lost at the end of an epoch, that epoch's on_epoch_end comes next, which it may have been called with.
  virtual void on_become_chief() { on_train_begin(); }

  // In place of on_train_begin in a worker that comes to a fit that runs (elastic strategies), before `load`. The other
  // workers go on meanwhile, so nothing in it may be collective. on_epoch_begin of the epoch that runs comes next,
  // where the others had it long before.
  virtual void on_join() { on_train_begin(); }

  // Called where workers of an elastic strategy were lost together that alone had a part of the state (StateLost).
  // Reads a state from which training can go on, and changes nothing. Returns a function that puts it in place and
  // cannot fail; null where there is none. All workers call it together, and again where another one is lost meanwhile.
  virtual std::function<void()> on_state_lost() { return nullptr; }

  // Called once, before on_train_begin.
  void attach(Model& model, const FitPlan& plan) {
    model_ = &model;
    plan_ = plan;
  }

  // Called once after everything else, also where an exception ends fit: gives back what on_train_begin took.
  virtual void detach() noexcept {}

 protected:
  Model& model() const { return *model_; }
  const FitPlan& plan() const { return plan_; }

 private:
  Model* model_ = nullptr;
  FitPlan plan_;
};

// One entry of FitOptions::callbacks: made from a callback, which it copies, or from a shared pointer to one.
class AnyCallback {
 public:
  template <std::derived_from<Callback> T>
  AnyCallback(T callback) : callback_(std::make_shared<T>(std::move(callback))) {}  // NOLINT: a callback is an entry
  template <std::derived_from<Callback> T>
  AnyCallback(std::shared_ptr<T> callback) : callback_(std::move(callback)) {}  // NOLINT; fit refuses null

  Callback* operator->() const { return callback_.get(); }

 private:
  std::shared_ptr<Callback> callback_;
};

// Functions as a callback.
class LambdaCallback : public Callback {
 public:
  struct Functions {
    std::function<void()> on_train_begin = {};
    std::function<void(int)> on_epoch_begin = {};
    std::function<void(std::int64_t)> on_train_batch_begin = {};
    std::function<void(std::int64_t, const Logs&)> on_train_batch_end = {};
    std::function<void(int, const Logs&)> on_epoch_end = {};
    std::function<void()> on_train_end = {};
  };
  explicit LambdaCallback(Functions functions) : functions_(std::move(functions)) {}
  void on_train_begin() override { call(functions_.on_train_begin); }
  void on_epoch_begin(int epoch) override { call(functions_.on_epoch_begin, epoch); }
  void on_train_batch_begin(std::int64_t batch) override { call(functions_.on_train_batch_begin, batch); }
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override {
    call(functions_.on_train_batch_end, batch, logs);
  }
  void on_epoch_end(int epoch, const Logs& logs) override { call(functions_.on_epoch_end, epoch, logs); }
  void on_train_end() override { call(functions_.on_train_end); }

 private:
  template <class... Args>
  static void call(const std::function<void(Args...)>& function, std::type_identity_t<Args>... args) {
    if (function) function(args...);
  }
  Functions functions_;
};

}  // namespace lockstep
