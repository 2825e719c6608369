// Steps that are traced from LibTorch's operators, compiled into one program, and run by all replicas at once, each on
// a device of its own: TPUs. The module `tpu` implements this.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/base/buffer.h"
#include "lockstep/base/deadline.h"
#include "lockstep/cluster/store.h"

namespace lockstep::ops {

// A tensor that every replica has on its device, from program to program. The variable belongs to tensors of the host,
// which a traced step may use as always: the program then uses the device's tensor. Values written into the host's
// tensor reach the devices with the next program.
class DeviceVariable {
 public:
  virtual ~DeviceVariable() = default;
};

// Several variables, whose tensors of the host may be views of the same memory.
class DeviceVariables {
 public:
  virtual ~DeviceVariables() = default;
  virtual DeviceVariable& operator[](std::size_t i) = 0;

  // Gives the host's tensors the devices' values, where a program has changed these since. Throws DeviceError where a
  // program failed that had to change them, and DeadlineExceeded.
  virtual void fetch(Deadline deadline) = 0;
};

// The step that is traced, for the code that is traced. Tensors of it have shapes and no values. Used by the thread
// that traces.
class StepTrace {
 public:
  virtual ~StepTrace() = default;

  virtual int replicas() const = 0;

  // The variable's value in the program, which requires a gradient where the host's tensor does. A value written into
  // it is the variable's new value.
  virtual at::Tensor value_of(DeviceVariable& variable) = 0;

  // Exchange values of all replicas, with equal results on all; without gradients. A dtype's values are sent together.
  virtual std::vector<at::Tensor> all_reduce(ReduceOp op, const std::vector<at::Tensor>& values) = 0;
  virtual at::Tensor all_gather(const at::Tensor& value, std::int64_t axis) = 0;

  // A scalar that the host computes anew for each step that updates: `update` is how many updates of the same launch
  // come before it.
  virtual at::Tensor number(at::ScalarType dtype, std::function<double(std::int64_t update)> value) = 0;

  // Says which examples of a batch count that was filled up with others: [batch], 1 or 0. Means over the batch leave
  // the others out (batch_norm). Not called: all count.
  virtual void set_counts(const at::Tensor& counts) = 0;

  // How many of `rows` count, a scalar float. `rows`: the batch, or some for each example.
  virtual at::Tensor counted(std::int64_t rows) = 0;

  // The variable, where the step has changed it, keeps its old value on a replica of whose examples none counts.
  virtual void keep_without_examples(DeviceVariable& variable) = 0;

  // How many times this was called before for the same optimizer.
  virtual std::int64_t number_of_update(const void* optimizer) = 0;

  // Called once for each update that was launched.
  virtual void after_update(std::function<void()> act) = 0;
};

// The step that this thread traces, or computes gradients for; null: none.
StepTrace* current_trace();

// Makes `trace` the current one, or none, for threads that see the OperatorMode of now.
void set_current_trace(StepTrace* trace);

// The results of a launch, once they are computed.
class LaunchedProgram {
 public:
  virtual ~LaunchedProgram() = default;

  // [replica][result], in host memory. Throws DeviceError where the program failed, DeadlineExceeded, and what `check`
  // throws, which is called about ten times a second where it is given.
  virtual std::vector<std::vector<at::Tensor>> results(Deadline deadline, const std::function<void()>& check) = 0;
};

// A program's inputs, on their way to the devices.
class ProgramInputs {
 public:
  virtual ~ProgramInputs() = default;
};

// One compiled step, or several that are launched together. Replicas are those of this process.
class CompiledProgram {
 public:
  struct Launch {
    std::unique_ptr<ProgramInputs> inputs;          // of this program
    std::vector<std::vector<std::uint64_t>> seeds;  // [replica][step], of the step's random numbers
    std::vector<bool> updates;                      // [step]: whether it has examples, so that it changes variables
  };

  virtual ~CompiledProgram() = default;

  // A hash of the program's text, equal in all processes.
  virtual std::uint64_t hash() const = 0;

  // Begins to copy inputs [replica][input] from host memory, also while another run goes on; those of several steps are
  // [step, ...].
  virtual std::unique_ptr<ProgramInputs> copy(const std::vector<std::vector<at::Tensor>>& inputs) = 0;

  // Begins a run. Results of several steps are [step, ...].
  virtual std::unique_ptr<LaunchedProgram> launch(Launch launch) = 0;
};

// How often programs were traced and compiled. bytes: the device memory that the program needs that was compiled or
// loaded last, for arguments, results, code and intermediate values; 0 where the plugin does not tell.
struct ProgramCounts {
  std::int64_t traced = 0, compiled = 0, bytes = 0;
};

// The devices of a strategy. Devices of several processes run programs together: all processes must launch them, in one
// order. One thread at a time uses them.
class ProgramDevices {
 public:
  using Tensors = std::vector<at::Tensor>;

  struct Step {
    std::string name;                                        // for messages: "the training step"
    Tensors inputs;                                          // like a replica's, of one step
    int steps = 1;                                           // a launch
    std::function<Tensors(const Tensors& inputs)> function;  // that is traced; gives the results
  };

  virtual ~ProgramDevices() = default;

  virtual int replicas() const = 0;                 // of this process: one a device
  virtual int all_replicas() const = 0;             // of all processes
  virtual std::string kind() const = 0;             // of the devices: "TPU v5 lite"
  virtual const ProgramCounts& counts() const = 0;  // of this process
  virtual std::string describe() const = 0;         // what must be the same for all processes, in lines

  // Another process has failed: the plugin does not wait for what it would have told. Any thread may call.
  virtual void fail_waiters(const std::string& reason) const = 0;

  // hosts: of each variable a tensor, or one for each replica. They are remembered by the TensorImpl of the handles,
  // not by their memory.
  virtual std::unique_ptr<DeviceVariables> variables(std::vector<Tensors> hosts) = 0;

  // Calls step.function once, and compiles what it did. Throws what the function throws; Error naming an operator that
  // cannot be compiled; DeviceError with the compiler's text.
  virtual std::unique_ptr<CompiledProgram> compile(const Step& step) = 0;
};

// This process among those whose devices run programs together.
struct ProgramProcesses {
  int rank = 0, size = 1;
  Store store;  // of the processes that run together alone
};

struct ProgramDevicesOptions {
  using Value = std::variant<std::string, std::int64_t, bool, float>;

  std::string plugin;                                  // the path of a PJRT plugin; empty: as the environment says
  std::vector<std::pair<std::string, Value>> options;  // of the plugin's client
  int replicas = 0;                                    // of all processes; 0: one on each device
  double start_seconds = 0;                            // until all processes have come, and devices are open
  std::optional<ProgramProcesses> processes = {};      // none: this one is alone
};

// Finds and opens devices.
using OpenProgramDevices = std::function<std::shared_ptr<ProgramDevices>(const ProgramDevicesOptions& options)>;

// Returns the module `tpu`'s, whose library the first call loads. Throws DeviceError in a build without the library.
const OpenProgramDevices& open_program_devices();

// Work that is recorded on a device and replayed without calling its operators one by one: a CUDA graph.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;

  // Enqueues the work once more, on the same memory.
  virtual void replay() = 0;
};

// Calls `work` so that its kernels are recorded and not run. Throws c10::Error where something in it cannot be
// recorded, such as waiting for the device.
using WorkRecorder =
    std::function<std::unique_ptr<RecordedWork>(c10::Device device, const std::function<void()>& work)>;

// The recorder for GPUs, which the module `cuda` sets when the library is loaded; empty in a build without it.
WorkRecorder& work_recorder();

}  // namespace lockstep::ops
