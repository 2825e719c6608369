// A strategy's devices: opened by a plugin, with the programs that were compiled for them.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>

#include "ops/traced_program.h"
#include "pjrt/executable.h"
#include "tpu/program_cache.h"
#include "tpu/step_trace.h"
#include "tpu/variable_table.h"

namespace lockstep::tpu {

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
  pjrt::Executable compiled(const std::string& name, const ProgramKey& key) const;
  std::shared_ptr<const pjrt::Executable> executable(const std::string& name, const std::string& text);

  Replicas replicas_;
  ops::ProgramCounts counts_;
  VariableTable variables_;
  const ProgramCache cache_;

  // The programs that were compiled last, by their text: a step that is traced anew is often one of them.
  std::map<std::string, std::shared_ptr<const pjrt::Executable>> executables_;
  std::deque<std::string> compiled_last_;
};

}  // namespace lockstep::tpu
