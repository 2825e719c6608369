// Who leads a model's calls: nobody, where all processes of the strategy make them alike; or a chief, where parameter
// servers have the variables (parameter_server/servers/led_by_chief.h).
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/strategy/strategy.h"
#include "train/evaluate.h"
#include "train/model_state.h"
#include "train/step_source.h"

namespace lockstep {
class ModelImpl;
}

namespace lockstep::train {

// The lead of processes that make all calls alike. One thread.
class Lead {
 public:
  // Makes the lead that the model's strategy needs; `impl` must outlive it.
  static std::shared_ptr<Lead> of(ModelImpl& impl);
  explicit Lead(ModelImpl& impl) : impl_(impl) {}
  virtual ~Lead() = default;
  Lead(const Lead&) = delete;
  Lead& operator=(const Lead&) = delete;

  // Returns what act() returns. Where a chief leads, only the chief calls act(). The others call follow(number of the
  // call), which returns the outcome of the chief's; without `follow` they wait for the chief's outcome. In a fit it is
  // act(). A chief that was started again does not act where the earlier chief had an outcome.
  using Follow = std::function<std::string(std::int64_t call)>;
  template <class Act>
  auto call(const std::string& name, const Act& act, const Follow& follow = {}) -> decltype(act());

  // Calls act(). A chief calls it alone, and, outside of fit, once however often it is started again.
  virtual void once(const std::function<void()>& act) const { act(); }

  // Does what fit does on a process that follows the chief's call, and returns the outcome of the chief's.
  virtual std::string follow_fit(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call);

  // True where other processes may take part in each step, however many there are now.
  virtual bool needs_each_step() const;

  // Prepares a fit: a chief that was started again loads what the servers do not have.
  virtual void prepare_fit(const Dataset& /*data*/) {}
  virtual std::unique_ptr<StepSource> steps(const Dataset& data, const FitOptions& options) const;

  // A replica's weight for a loss that is a sum: 1 on replica 0, with or without examples, and 0 on the others.
  virtual double weight_of_sum(const ReplicaContext& replica) const;

  // Brings values here that other processes have updated.
  virtual void fetch() const;

  // Fetches where the values here may be older than those that a file is to have.
  virtual void fetch_before_saving() const {}

  // Writes a file of the model's state: one file of rank 0's, or the chief's and its servers'. Collective, in a
  // section. The model is built, and compiled for a checkpoint.
  void write(const StateFile& file) const;

  // Does what the public call does.
  virtual void load_checkpoint(const std::string& path) const;

  // Writes the first backup of a fit that begins anew, where servers that are started again will need one.
  virtual void write_first_backup(const std::string& /*path*/) const {}

  // Throws InvalidArgument, which names the callback, where no file can be written while workers train on.
  virtual void require_background(const char* /*callback*/) const {}

  // Call it after weights were loaded.
  virtual void tell_of_weights() const {}

 protected:
  virtual void write_file(const StateFile& file) const;

  // Returns the call's outcome where this process does not act; else `end` or `fail` follows its act().
  virtual std::optional<std::string> begin(const std::string& /*name*/, const Follow& /*follow*/) { return {}; }
  virtual void end(const std::function<std::string()>& /*outcome*/) {}
  virtual void fail(const std::exception& /*error*/) {}

  bool is_in_fit() const;

  ModelImpl& impl_;
};

template <class Act>
auto Lead::call(const std::string& name, const Act& act, const Follow& follow) -> decltype(act()) {
  const bool is_led = !is_in_fit();
  if (is_led) {
    if (const auto told = begin(name, follow)) return parse<decltype(act())>(*told);
  }
  try {
    const auto result = act();
    if (is_led) end([&] { return print(result); });
    return result;
  } catch (const std::exception& error) {
    if (is_led) fail(error);
    throw;
  }
}

}  // namespace lockstep::train
