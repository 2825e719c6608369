// A compiled step with the variables that it uses.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/traced_program.h"
#include "pjrt/executable.h"
#include "tpu/step_trace.h"

namespace lockstep::tpu {

class StepProgram final : public ops::CompiledProgram {
 public:
  // name: for messages, such as "the training step".
  StepProgram(std::string name, Replicas replicas, StepLayout layout,
              std::shared_ptr<const pjrt::Executable> executable, int steps, std::uint64_t hash)
      : name_(std::move(name)),
        replicas_(std::move(replicas)),
        layout_(std::move(layout)),
        executable_(std::move(executable)),
        steps_(steps),
        hash_(hash) {}

  std::uint64_t hash() const override { return hash_; }
  std::unique_ptr<ops::ProgramInputs> copy(const std::vector<std::vector<at::Tensor>>& inputs) override;
  std::unique_ptr<ops::LaunchedProgram> launch(Launch launch) override;

 private:
  // The arguments of replica `replica`, beside its inputs, that change from launch to launch.
  std::vector<std::pair<int, pjrt::Buffer>> numbers(const Launch& launch, std::size_t replica) const;
  std::unique_ptr<ops::LaunchedProgram> run(const std::vector<std::vector<const pjrt::Buffer*>>& arguments,
                                            std::vector<std::shared_ptr<const Variable::Values>> used_values);

  const std::string name_;
  const Replicas replicas_;
  const StepLayout layout_;
  const std::shared_ptr<const pjrt::Executable> executable_;
  const int steps_;
  const std::uint64_t hash_;
};

}  // namespace lockstep::tpu
