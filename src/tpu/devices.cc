#include "tpu/devices.h"


#include <chrono>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "tpu/step_program.h"

namespace lockstep::tpu {
namespace {

// A plugin's client, which is one for the process while anything uses it: chips cannot be opened twice.
std::shared_ptr<const pjrt::Client> client_of(const pjrt::Plugin& plugin, const pjrt::Options& options) {
  static Mutex mutex;
  static std::map<std::pair<std::string, pjrt::Options>, std::weak_ptr<const pjrt::Client>> clients;  // guarded by it
  const MutexLock lock(mutex);
  auto& known = clients[{plugin.path(), options}];
  if (auto client = known.lock()) return client;
  std::shared_ptr<const pjrt::Client> made = pjrt::Client::create(plugin, options);
  known = made;
  return made;
}

Replicas open(const ops::ProgramDevicesOptions& options) {
  const auto& plugin = pjrt::Plugin::load(pjrt::plugin_path(options.plugin));
  Replicas replicas{client_of(plugin, options.options), {}};
  const auto& devices = replicas.client->devices();
  const auto wanted = options.replicas == 0 ? devices.size() : static_cast<std::size_t>(options.replicas);
  if (devices.empty()) throw DeviceError(text(plugin.path(), ": the plugin has no device in this process"));
  if (options.replicas < 0 || wanted > devices.size()) {
    throw InvalidArgument(text("the number of replicas is ", options.replicas, "; ", plugin.path(), " has ",
                               devices.size(), " devices (", devices[0].kind, "), so it must be from 1 to ",
                               devices.size()));
  }
  replicas.devices.assign(devices.begin(), devices.begin() + static_cast<std::ptrdiff_t>(wanted));
  return replicas;
}

constexpr std::size_t kKeptPrograms = 32;

struct VariableList final : ops::DeviceVariables {
  ops::DeviceVariable& operator[](std::size_t i) override { return *all.at(i); }
  void fetch(Deadline deadline) override { Variable::fetch(all, deadline); }

  std::vector<std::shared_ptr<Variable>> all;
};

const bool is_set = [] {
  ops::open_program_devices() = [](const ops::ProgramDevicesOptions& options) -> std::shared_ptr<ops::ProgramDevices> {
    return std::make_shared<Devices>(options);
  };
  return true;
}();

}  // namespace

Devices::Devices(const ops::ProgramDevicesOptions& options) : replicas_(open(options)) {}

std::unique_ptr<ops::DeviceVariables> Devices::variables(std::vector<Tensors> hosts) {
  std::erase_if(variables_, [](const auto& entry) { return entry.second.expired(); });
  auto list = std::make_unique<VariableList>();
  for (auto& host : hosts) {
    const auto& made = list->all.emplace_back(std::make_shared<Variable>(replicas_, std::move(host)));
    for (const auto& tensor : made->host()) variables_[tensor.unsafeGetTensorImpl()] = made;
  }
  return list;
}

std::shared_ptr<Variable> Devices::find(const at::Tensor& host) {
  const auto found = variables_.find(host.unsafeGetTensorImpl());
  return found == variables_.end() ? nullptr : found->second.lock();
}

std::unique_ptr<ops::CompiledProgram> Devices::compile(const Step& step) {
  StepLayout layout;
  std::string program;
  {
    TracedStep trace(replicas(), [this](const at::Tensor& host) { return find(host); });
    ++counts_.traced;
    program = trace.finish(step.function(trace.add_inputs(step.inputs)), step.steps);
    layout = trace.layout();
  }
  return std::make_unique<StepProgram>(replicas_, std::move(layout), executable(step.name, program), step.steps);
}

// XLA's products by XNNPACK wait on a thread of the CPU client's pool for others of it: where replicas wait for each other
// on these as well, none may be left.
std::vector<std::pair<std::string, bool>> Devices::switches() const {
  if (replicas_.client->platform() != "cpu" || replicas() == 1) return {};
  return {{"xla_cpu_use_xnnpack", false}};
}

std::shared_ptr<const pjrt::Executable> Devices::executable(const std::string& name, const std::string& text) {
  const auto known = executables_.find(text);
  if (known != executables_.end()) return known->second;
  const auto begin = std::chrono::steady_clock::now();
  auto made = std::make_shared<const pjrt::Executable>(
      pjrt::Executable::compile(replicas_.client, text, {.replicas = replicas(), .switches = switches()}));
  executables_.emplace(text, made);
  compiled_last_.push_back(text);
  if (compiled_last_.size() > kKeptPrograms) {
    executables_.erase(compiled_last_.front());
    compiled_last_.pop_front();
  }
  ++counts_.compiled;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  log_info(lockstep::text("compiled ", name, " for ", replicas(), " x ", kind(), " in ", seconds.count(), " s"));
  return made;
}

}  // namespace lockstep::tpu
