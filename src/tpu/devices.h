// A strategy's devices: opened by a plugin, with the programs that were compiled for them.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/traced_program.h"
#include "tpu/pjrt/executable.h"
#include "tpu/step_trace.h"
#include "tpu/variable.h"

namespace lockstep::tpu {

// Compiled programs on disk, in the folder that the environment's LOCKSTEP_CACHE names.

// The flags that the compilers of plugins take from the environment, in lines.
std::string compiler_flags();

// A program's key is its text, with the options and all else that decides the compiler's result. One thread at a time;
// processes of one user may share a folder. Each file has the whole key, which is compared.
class ProgramCache {
 public:
  // Makes the folder if need be. Throws InvalidArgument where others may write in it: their programs would run here.
  explicit ProgramCache(std::shared_ptr<const pjrt::Client> client);

  // The program, where it was stored by the same version of the plugin for devices of the same kind. A file that is
  // damaged, of another key, of another user, or that the plugin does not take, gives a warning, and nothing.
  std::optional<pjrt::Executable> find(const std::string& text, const pjrt::CompileOptions& options) const;

  // Warns where the program cannot be stored.
  void store(const std::string& text, const pjrt::CompileOptions& options, const pjrt::Executable& executable) const;

 private:
  std::string key_of(const std::string& text, const pjrt::CompileOptions& options) const;
  std::string name_of(const std::string& key) const;

  const std::shared_ptr<const pjrt::Client> client_;
  const std::string folder_;  // empty: there is none
};

// A compiled step with the variables that it uses.
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

class Devices final : public ops::ProgramDevices {
 public:
  // Throws DeviceError where there is no plugin, where it cannot use its devices, and where it knows of others than the
  // processes have. Throws InvalidArgument for more replicas than devices, and where processes would have none. Throws
  // DeadlineExceeded, which names processes that have not come.
  explicit Devices(const ops::ProgramDevicesOptions& options);

  int replicas() const override { return static_cast<int>(replicas_.devices.size()); }
  int all_replicas() const override { return static_cast<int>(replicas_.of_all_processes.size()); }
  std::string kind() const override { return replicas_.devices[0].kind; }
  const ops::ProgramCounts& counts() const override { return counts_; }
  std::string describe() const override;
  void fail_waiters(const std::string& reason) const override { replicas_.client->fail_waiters(reason); }
  std::unique_ptr<ops::DeviceVariables> variables(std::vector<Tensors> hosts) override;
  std::unique_ptr<ops::CompiledProgram> compile(const Step& step) override;

 private:
  std::vector<std::pair<std::string, bool>> switches() const;
  bool has_our_devices(const pjrt::Executable& executable) const;
  pjrt::Executable compiled(const std::string& name, const std::string& text,
                            const pjrt::CompileOptions& options) const;
  std::shared_ptr<const pjrt::Executable> executable(const std::string& name, const std::string& text);

  Replicas replicas_;
  ops::ProgramCounts counts_;
  VariableTable variables_;
  const ProgramCache cache_;

  // The programs that were compiled last, by their text: a step that is traced anew is often one of them.
  std::map<std::string, std::shared_ptr<const pjrt::Executable>> executables_;
  std::deque<std::string> compiled_last_;
};

// `chips`: a topology's name, such as "v5e:2x4". A step that is compiled is described in the file that the
// environment's LOCKSTEP_COMPILE_REPORT names, or on standard output: a line each. Launching it throws DeviceError.
std::shared_ptr<ops::ProgramDevices> devices_to_compile_for(const std::string& chips,
                                                            const ops::ProgramDevicesOptions& options);

}  // namespace lockstep::tpu
