#include "tpu/devices.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>

#include "base/hash.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "tpu/pjrt/client.h"

namespace lockstep::tpu {
namespace {

// A plugin's client, which is one for the process while anything uses it: chips cannot be opened twice.
std::shared_ptr<const pjrt::Client> client_of(const pjrt::Plugin& plugin, const ops::ProgramDevicesOptions& devices,
                                              Deadline deadline) {
  const auto options = pjrt::plugin_options(devices.options);
  static Mutex mutex;
  using Key = std::pair<std::string, pjrt::Options>;
  static std::map<Key, std::weak_ptr<const pjrt::Client>> clients;  // guarded by it
  static std::set<Key> never_opened;                                // guarded by it: a thread is in the plugin still
  const MutexLock lock(mutex);
  const Key key{plugin.path(), options};
  if (never_opened.contains(key)) {
    throw DeviceError(text(plugin.path(), ": an earlier call has waited in vain for the plugin to open its devices; ",
                           "start the process again"));
  }
  if (auto client = clients[key].lock()) {
    if (!client->failure().empty()) {
      throw ClusterError(text(plugin.path(),
                              ": the devices are still open from a training with a process that failed (",
                              client->failure(), "): start all processes again"));
    }
    if (client->has_other_processes() == devices.processes.has_value()) return client;
    throw InvalidArgument(text(plugin.path(),
                               ": a strategy of this process alone, and one of several processes, cannot ",
                               "use the same devices at the same time"));
  }
  std::optional<Store> store;
  if (devices.processes) store = devices.processes->store.prefixed("plugin/");
  try {
    const std::shared_ptr<const pjrt::Client> made = pjrt::Client::create(plugin, deadline, options, store);
    clients[key] = made;
    return made;
  } catch (const DeadlineExceeded&) {
    never_opened.insert(key);
    throw;
  }
}

// Returns the text of each process, by rank.
std::vector<std::string> exchange(const ops::ProgramProcesses& processes, Deadline deadline, const std::string& what,
                                  const std::string& mine) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < processes.size; ++rank) keys.push_back(text(what, "/", rank));
  processes.store.set(keys[static_cast<std::size_t>(processes.rank)], mine, deadline);
  return processes.store.get(keys, deadline);
}

// The devices of all processes, in the order of the processes' ranks, which the plugin may number otherwise.
std::vector<pjrt::Device> in_order_of_ranks(const pjrt::Client& client, const ops::ProgramProcesses& processes,
                                            Deadline deadline) {
  const auto all = client.devices_of_all_processes();
  const auto here = client.devices().size();
  std::vector<pjrt::Device> in_order;
  bool are_equal = true;
  for (const auto& number : exchange(processes, deadline, "number in the plugin", std::to_string(client.process()))) {
    const auto before = in_order.size();
    for (const auto& device : all)
      if (std::to_string(device.process) == number) in_order.push_back(device);
    are_equal = are_equal && in_order.size() - before == here;
  }
  if (are_equal && in_order.size() == all.size()) return in_order;
  throw DeviceError(text(client.plugin().path(), ": on rank ", processes.rank, " the plugin has ", here, " devices in ",
                         "this process and ", all.size(), " in all, so that it has not joined the devices of the ",
                         processes.size, " processes into one TPU. Start one process on each of its hosts; libtpu ",
                         "finds the other hosts by TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, or by the VM's metadata"));
}

// A process alone does not own all devices of a TPU of several hosts.
void check_alone(const pjrt::Client& client) {
  const auto here = client.devices().size(), all = client.devices_of_all_processes().size();
  if (here == all) return;
  throw DeviceError(text(client.plugin().path(), ": this process has ", here, " of ", all, " devices, and knows of no ",
                         "process that has the others, with which it must train together: start it on each host by ",
                         "`lockstep run -H host0,host1`, or with TPU_WORKER_ID and TPU_WORKER_HOSTNAMES set"));
}

std::vector<pjrt::Device> devices_of_replicas(const pjrt::Client& client, const ops::ProgramDevicesOptions& options,
                                              Deadline deadline) {
  const auto& plugin = client.plugin().path();
  if (client.devices().empty()) throw DeviceError(text(plugin, ": the plugin has no device in this process"));
  if (!options.processes) check_alone(client);
  auto devices = options.processes ? in_order_of_ranks(client, *options.processes, deadline) : client.devices();
  const int count = static_cast<int>(devices.size());
  const bool takes_all = options.processes.has_value();
  if (options.replicas < 0 || options.replicas > count ||
      (takes_all && options.replicas != 0 && options.replicas != count)) {
    throw InvalidArgument(
        text("the number of replicas is ", options.replicas, "; ", plugin, " has ", count, " devices (",
             devices[0].kind, "), so it must be ",
             takes_all ? text("0 or ", count, ", since several processes train together") : text("from 1 to ", count)));
  }
  if (options.replicas > 0) devices.resize(static_cast<std::size_t>(options.replicas));
  return devices;
}

Replicas open(const ops::ProgramDevicesOptions& options) {
  const auto deadline = Deadline::after(std::chrono::duration<double>(options.start_seconds));
  const auto& plugin = pjrt::Plugin::load(pjrt::plugin_path(options.plugin));
  // A process that has no plugin ends the others' wait here, before theirs wait for it.
  if (options.processes) exchange(*options.processes, deadline, "plugin is loaded", plugin.path());
  Replicas replicas{.client = client_of(plugin, options, deadline)};
  if (options.processes) replicas.launches = std::make_shared<int>(0);
  const int process = replicas.client->process();
  for (const auto& device : devices_of_replicas(*replicas.client, options, deadline)) {
    replicas.of_all_processes.push_back(device.id);
    if (device.process == process) replicas.devices.push_back(device);
  }
  return replicas;
}

constexpr std::size_t kKeptPrograms = 32;

// The bytes that a program needs on a device; 0 where the plugin does not tell.
std::int64_t bytes_of(const pjrt::Program& program) {
  try {
    return program.memory().total();
  } catch (const DeviceError&) {
    return 0;
  }
}

std::shared_ptr<ops::ProgramDevices> open_devices(const ops::ProgramDevicesOptions& options) {
  if (const char* const chips = std::getenv("LOCKSTEP_COMPILE_FOR")) return devices_to_compile_for(chips, options);
  return std::make_shared<Devices>(options);
}

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
    const bool for_cpu = replicas_.client->platform() == "cpu";
    TracedStep trace(all_replicas(), for_cpu, [this](const at::Tensor& host) { return variables_.find(host); });
    ++counts_.traced;
    program = trace.finish(step.function(trace.add_inputs(step.inputs)), step.steps);
    layout = trace.layout();
  }
  const auto hash = hash_of(program);
  return std::make_unique<StepProgram>(step.name, replicas_, std::move(layout), executable(step.name, program),
                                       step.steps, hash);
}

std::string Devices::describe() const {
  return text("devices ", kind(), "\nplugin ", replicas_.client->platform(), " ", replicas_.client->version(), "\n",
              compiler_flags());
}

// Compares devices in their order, in which a program gets its arguments.
bool Devices::has_our_devices(const pjrt::Executable& executable) const {
  const auto& theirs = executable.devices();
  const auto& ours = replicas_.devices;
  return std::equal(theirs.begin(), theirs.end(), ours.begin(), ours.end(),
                    [](const auto& a, const auto& b) { return a.id == b.id; });
}

// XLA's products by XNNPACK wait on a thread of the CPU client's pool for other threads of the pool. Replicas wait for
// each other on these threads as well, so none may be left.
std::vector<std::pair<std::string, bool>> Devices::switches() const {
  if (replicas_.client->platform() != "cpu" || all_replicas() == 1) return {};
  return {{"xla_cpu_use_xnnpack", false}};
}

pjrt::Executable Devices::compiled(const std::string& name, const std::string& text,
                                   const pjrt::CompileOptions& options) const {
  try {
    return pjrt::Executable::compile(replicas_.client, text, options);
  } catch (const DeviceError& error) {
    throw DeviceError(lockstep::text(name, " for ", all_replicas(), " x ", kind(), ": ", error.what()));
  }
}

std::shared_ptr<const pjrt::Executable> Devices::executable(const std::string& name, const std::string& text) {
  const auto known = executables_.find(text);
  if (known != executables_.end()) return known->second;
  const pjrt::CompileOptions options{
      .replicas = all_replicas(), .devices = replicas_.of_all_processes, .switches = switches()};
  const auto begin = std::chrono::steady_clock::now();
  auto stored = cache_.find(text, options);
  if (stored && !has_our_devices(*stored)) {
    log_warning("a program in LOCKSTEP_CACHE is for other devices, and compiled again");
    stored.reset();
  }
  const bool is_stored = stored.has_value();
  auto made = std::make_shared<const pjrt::Executable>(is_stored ? *std::move(stored) : compiled(name, text, options));
  if (!has_our_devices(*made)) {
    throw DeviceError(lockstep::text(replicas_.client->plugin().path(), ": ", name,
                                     " was compiled for other devices than were asked for"));
  }
  executables_.emplace(text, made);
  compiled_last_.push_back(text);
  if (compiled_last_.size() > kKeptPrograms) {
    executables_.erase(compiled_last_.front());
    compiled_last_.pop_front();
  }
  if (!is_stored) {
    ++counts_.compiled;
    cache_.store(text, options, *made);
  }
  counts_.bytes = bytes_of(made->program());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  log_info(lockstep::text(
      is_stored ? "loaded " : "compiled ", name, " for ", all_replicas(), " x ", kind(),
      is_stored ? " from LOCKSTEP_CACHE in " : " in ", seconds.count(), " s",
      counts_.bytes == 0 ? ""
                         : lockstep::text(": needs ", (counts_.bytes + (1 << 20) - 1) >> 20, " MiB of each device")));
  return made;
}

}  // namespace lockstep::tpu

// The only entry of this library (ops/traced_program.h).
extern "C" const lockstep::ops::OpenProgramDevices* lockstep_open_program_devices() {
  static const lockstep::ops::OpenProgramDevices open = lockstep::tpu::open_devices;
  return &open;
}
