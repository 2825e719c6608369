// The kind of strategy whose devices run compiled steps of all replicas (TPUStrategy).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/traced_program.h"
#include "strategy/strategy_impl.h"
#include "tpu/programs/worker_watch.h"

namespace lockstep::programs {

// This process's threads only give the devices their input. One thread at a time, but for `tell_failure`.
class Programs final : public strategy::Kind {
 public:
  explicit Programs(std::shared_ptr<ops::ProgramDevices> devices) : devices_(std::move(devices)) {}

  void check_device(const std::string& /*device*/) const override {}
  void begin(StrategyImpl& strategy) override;
  std::string describe() const override { return "\n" + devices_->describe(); }
  void tell_failure(const std::exception& error) const override;
  std::shared_ptr<ReplicatedParameters> replicate(
      StrategyImpl& strategy, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const override;
  std::shared_ptr<GradientPath> make_gradient_path(const StrategyImpl& strategy, const Optimizer& optimizer,
                                                   std::shared_ptr<ReplicatedParameters> parameters,
                                                   gradient::GradientPathOptions options) const override;
  std::unique_ptr<ops::DeviceVariables> variable(const std::vector<at::Tensor>& copies) const override {
    return devices_->variables({copies});
  }
  bool compiles_steps() const override { return true; }
  std::vector<std::vector<at::Tensor>> run_compiled(StrategyImpl& strategy,
                                                    const internal::StepToRun& step) const override;
  std::shared_ptr<train::Execution> execution(ModelImpl& model) const override;

  const std::shared_ptr<ops::ProgramDevices>& devices() const { return devices_; }

  // Models are numbered, equally on all workers, as they are built.
  std::int64_t next_model() const { return ++models_; }

  // Returns the results of a program on these devices; calls `meanwhile` before it waits for them. Throws what
  // LaunchedProgram::results throws; what WorkerWatch::check throws, where another worker is lost or fails; and what
  // `meanwhile` throws, after telling the other workers, unless they told this one.
  std::vector<std::vector<at::Tensor>> results(StrategyImpl& strategy, ops::LaunchedProgram& launched,
                                               const std::function<void()>& meanwhile = {}) const;

  // Throws InvalidArgument on all `workers` where they would launch different programs next. Collective over them.
  // `inputs`: like those of each replica.
  static void check_same_program(const Communicator& workers, const std::string& name,
                                 const std::vector<at::Tensor>& inputs, const ops::CompiledProgram& program);

 private:
  const std::shared_ptr<ops::ProgramDevices> devices_;
  std::optional<WorkerWatch> watch_;  // of several workers
  mutable std::int64_t models_ = 0;
};

// Returns the devices of a TPUStrategy.
ops::ProgramDevices& devices_of(const StrategyImpl& strategy);

}  // namespace lockstep::programs
