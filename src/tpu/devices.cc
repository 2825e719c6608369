#include "tpu/devices.h"

#include <chrono>
#include <cstdlib>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "pjrt/named_values.h"
#include "tpu/compile_for.h"
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

// Which device the plugin gives to each replica: those of a small program.
std::vector<pjrt::Device> devices_of_replicas(const std::shared_ptr<const pjrt::Client>& client, int replicas) {
  pjrt::ProgramText text;
  const auto one = text.constant(1, {DType::float32, {}});
  return pjrt::Executable::compile(client, text.finish({one}, {}, replicas), {.replicas = replicas}).devices();
}

Replicas open(const ops::ProgramDevicesOptions& options) {
  const auto& plugin = pjrt::Plugin::load(pjrt::plugin_path(options.plugin));
  Replicas replicas{client_of(plugin, pjrt::plugin_options(options.options)), {}};
  const auto& devices = replicas.client->devices();
  const auto wanted = options.replicas == 0 ? devices.size() : static_cast<std::size_t>(options.replicas);
  if (devices.empty()) throw DeviceError(text(plugin.path(), ": the plugin has no device in this process"));
  if (options.replicas < 0 || wanted > devices.size()) {
    throw InvalidArgument(text("the number of replicas is ", options.replicas, "; ", plugin.path(), " has ",
                               devices.size(), " devices (", devices[0].kind, "), so it must be from 1 to ",
                               devices.size()));
  }
  replicas.devices = devices_of_replicas(replicas.client, static_cast<int>(wanted));
  return replicas;
}

constexpr std::size_t kKeptPrograms = 32;

// What a program needs of a device; 0 where the plugin does not tell.
std::int64_t bytes_of(const pjrt::Program& program) {
  try {
    return program.memory().total();
  } catch (const DeviceError&) {
    return 0;
  }
}

const bool is_set = [] {
  ops::open_program_devices() = [](const ops::ProgramDevicesOptions& options) -> std::shared_ptr<ops::ProgramDevices> {
    if (const char* const chips = std::getenv("LOCKSTEP_COMPILE_FOR")) return devices_to_compile_for(chips, options);
    return std::make_shared<Devices>(options);
  };
  return true;
}();

}  // namespace

Devices::Devices(const ops::ProgramDevicesOptions& options) : replicas_(open(options)), cache_(replicas_.client) {
  const Trace before_the_first_backward;
}

std::unique_ptr<ops::DeviceVariables> Devices::variables(std::vector<Tensors> hosts) {
  return variables_.add(replicas_, std::move(hosts));
}

std::unique_ptr<ops::CompiledProgram> Devices::compile(const Step& step) {
  StepLayout layout;
  std::string program;
  {
    const auto target = replicas_.client->platform() == "cpu" ? Trace::Target::cpu : Trace::Target::others;
    TracedStep trace(replicas(), target, [this](const at::Tensor& host) { return variables_.find(host); });
    ++counts_.traced;
    program = trace.finish(step.function(trace.add_inputs(step.inputs)), step.steps);
    layout = trace.layout();
  }
  return std::make_unique<StepProgram>(step.name, replicas_, std::move(layout), executable(step.name, program),
                                       step.steps);
}

// XLA's products by XNNPACK wait on a thread of the CPU client's pool for others of it: where replicas wait for each
// other on these as well, none may be left.
std::vector<std::pair<std::string, bool>> Devices::switches() const {
  if (replicas_.client->platform() != "cpu" || replicas() == 1) return {};
  return {{"xla_cpu_use_xnnpack", false}};
}

pjrt::Executable Devices::compiled(const std::string& name, const ProgramKey& key) const {
  try {
    return pjrt::Executable::compile(replicas_.client, key.text, key.options);
  } catch (const DeviceError& error) {
    throw DeviceError(text(name, " for ", replicas(), " x ", kind(), ": ", error.what()));
  }
}

std::shared_ptr<const pjrt::Executable> Devices::executable(const std::string& name, const std::string& text) {
  const auto known = executables_.find(text);
  if (known != executables_.end()) return known->second;
  const ProgramKey key{text, {.replicas = replicas(), .switches = switches()}};
  const auto begin = std::chrono::steady_clock::now();
  auto stored = cache_.find(key);
  const bool is_stored = stored.has_value();
  auto made = std::make_shared<const pjrt::Executable>(is_stored ? *std::move(stored) : compiled(name, key));
  executables_.emplace(text, made);
  compiled_last_.push_back(text);
  if (compiled_last_.size() > kKeptPrograms) {
    executables_.erase(compiled_last_.front());
    compiled_last_.pop_front();
  }
  if (!is_stored) {
    ++counts_.compiled;
    cache_.store(key, *made);
  }
  counts_.bytes = bytes_of(made->program());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  log_info(lockstep::text(
      is_stored ? "loaded " : "compiled ", name, " for ", replicas(), " x ", kind(),
      is_stored ? " from LOCKSTEP_CACHE in " : " in ", seconds.count(), " s",
      counts_.bytes == 0 ? ""
                         : lockstep::text(": needs ", (counts_.bytes + (1 << 20) - 1) >> 20, " MiB of each device")));
  return made;
}

}  // namespace lockstep::tpu
