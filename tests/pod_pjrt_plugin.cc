// A pod of several hosts, for tests, whose chips are CPUs. In each process the plugin for CPUs has the devices of all
// hosts, and every program runs on all of them. As on a pod, each process has its own devices, and all launch together.
// A process sees the values of its own devices alone. It gets those of the others at a launch, through the key-value
// callbacks. Hosts are numbered in the reverse order of TPU_WORKER_ID.
//
// LAST_LAUNCH_OF_HOST_0: the launch at which its process ends.
#include <pjrt_c_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pod_pjrt_store.h"

using namespace pod;

namespace {

constexpr int kDevicesOfAHost = 2;
constexpr int kTimeoutMs = 60'000;

// Where an argument comes from, so that other processes have the same: from a host's memory, or from a program.
struct Origin {
  std::string bytes = {};  // of the host's
  PJRT_Buffer_Type type = PJRT_Buffer_Type_INVALID;
  std::vector<std::int64_t> sizes = {};
  std::string result = {};  // "launch replica number", of a program
};

int hosts() {
  const std::string names = std::getenv("TPU_WORKER_HOSTNAMES");
  return 1 + static_cast<int>(std::count(names.begin(), names.end(), ','));
}
int this_host() { return hosts() - 1 - std::atoi(std::getenv("TPU_WORKER_ID")); }

struct Pod {
  SharedValues values;
  PJRT_Client* client = nullptr;
  std::vector<PJRT_Device*> here;                      // of this host
  std::map<PJRT_Buffer*, Origin> origins;              // of this host's values
  std::map<std::string, PJRT_Buffer*> of_other_hosts;  // by their origin
  std::string freed;                                   // origins of results that this host has freed
  int launches = 0;
  std::atomic<bool> hangs = false;
};
Pod* the_pod = nullptr;  // never freed: threads of the plugin may run until the process ends

int id_of(PJRT_Device* device) {
  PJRT_Device_GetDescription_Args of{.struct_size = PJRT_Device_GetDescription_Args_STRUCT_SIZE, .device = device};
  cpu().PJRT_Device_GetDescription(&of);
  PJRT_DeviceDescription_Id_Args id{.struct_size = PJRT_DeviceDescription_Id_Args_STRUCT_SIZE,
                                    .device_description = of.device_description};
  cpu().PJRT_DeviceDescription_Id(&id);
  return id.id;
}
int host_of(PJRT_Device* device) { return id_of(device) / kDevicesOfAHost; }

void destroy(PJRT_Buffer* buffer) {
  PJRT_Buffer_Destroy_Args args{.struct_size = PJRT_Buffer_Destroy_Args_STRUCT_SIZE, .buffer = buffer};
  cpu().PJRT_Buffer_Destroy(&args);
}

void destroy(PJRT_Event* event) {
  PJRT_Event_Destroy_Args args{.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE, .event = event};
  cpu().PJRT_Event_Destroy(&args);
}

PJRT_Buffer* copied(const void* data, PJRT_Buffer_Type type, const std::vector<std::int64_t>& sizes,
                    PJRT_Device* device) {
  PJRT_Client_BufferFromHostBuffer_Args args{.struct_size = PJRT_Client_BufferFromHostBuffer_Args_STRUCT_SIZE,
                                             .client = the_pod->client,
                                             .data = data,
                                             .type = type,
                                             .dims = sizes.data(),
                                             .num_dims = sizes.size(),
                                             .host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall,
                                             .device = device};
  check(cpu().PJRT_Client_BufferFromHostBuffer(&args));
  destroy(args.done_with_host_buffer);
  return args.buffer;
}

// A file of fields, each with its length.
void write(std::ostream& to, const std::string& field) { to << field.size() << ' ' << field; }
std::string read(std::istream& from) {
  std::size_t size = 0;
  from >> size;
  from.get();
  std::string field(size, '\0');
  from.read(field.data(), static_cast<std::streamsize>(size));
  return field;
}

void write(std::ostream& to, const Origin& origin) {
  write(to, origin.result);
  if (!origin.result.empty()) return;
  to << static_cast<int>(origin.type) << ' ' << origin.sizes.size() << ' ';
  for (const auto size : origin.sizes) to << size << ' ';
  write(to, origin.bytes);
}

// Reads the value of another host onto a device; `made` is freed after the launch.
PJRT_Buffer* read_value(std::istream& from, PJRT_Device* device, std::vector<PJRT_Buffer*>& made) {
  const auto result = read(from);
  if (!result.empty()) return the_pod->of_other_hosts.at(result);
  int type = 0;
  std::size_t dimensions = 0;
  from >> type >> dimensions;
  std::vector<std::int64_t> sizes(dimensions);
  for (auto& size : sizes) from >> size;
  from.get();
  const auto bytes = read(from);
  return made.emplace_back(copied(bytes.data(), static_cast<PJRT_Buffer_Type>(type), sizes, device));
}

std::vector<PJRT_Device*> all_devices(PJRT_LoadedExecutable* executable) {
  PJRT_LoadedExecutable_AddressableDevices_Args args{
      .struct_size = PJRT_LoadedExecutable_AddressableDevices_Args_STRUCT_SIZE, .executable = executable};
  check(cpu().PJRT_LoadedExecutable_AddressableDevices(&args));
  return {args.addressable_devices, args.addressable_devices + args.num_addressable_devices};
}

std::size_t outputs_of(PJRT_LoadedExecutable* executable) {
  PJRT_LoadedExecutable_GetExecutable_Args of{.struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE,
                                              .loaded_executable = executable};
  check(cpu().PJRT_LoadedExecutable_GetExecutable(&of));
  PJRT_Executable_NumOutputs_Args count{.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE,
                                        .executable = of.executable};
  check(cpu().PJRT_Executable_NumOutputs(&count));
  PJRT_Executable_Destroy_Args end{.struct_size = PJRT_Executable_Destroy_Args_STRUCT_SIZE,
                                   .executable = of.executable};
  cpu().PJRT_Executable_Destroy(&end);
  return count.num_outputs;
}

// The launch's number, then [replica of this host][argument] as the other hosts can make them, and what this host has
// freed since the last one.
std::string describe(const PJRT_LoadedExecutable_Execute_Args& args) {
  std::ostringstream all;
  write(all, std::to_string(args.options->launch_id));
  for (std::size_t i = 0; i < args.num_devices; ++i)
    for (std::size_t k = 0; k < args.num_args; ++k) write(all, the_pod->origins.at(args.argument_lists[i][k]));
  write(all, std::exchange(the_pod->freed, {}));
  return all.str();
}

// A launch that other hosts do not make, whose results never come: what stands for them is a number that is never read.
void hang(PJRT_LoadedExecutable_Execute_Args& args) {
  const float number = 0;
  the_pod->hangs = true;
  for (std::size_t i = 0; i < args.num_devices; ++i)
    for (std::size_t k = 0; k < outputs_of(args.executable); ++k)
      args.output_lists[i][k] = copied(&number, PJRT_Buffer_Type_F32, {}, the_pod->here[i]);
  for (std::size_t i = 0; args.device_complete_events != nullptr && i < args.num_devices; ++i) {
    PJRT_Buffer_ReadyEvent_Args ready{.struct_size = PJRT_Buffer_ReadyEvent_Args_STRUCT_SIZE,
                                      .buffer = copied(&number, PJRT_Buffer_Type_F32, {}, the_pod->here[i])};
    check(cpu().PJRT_Buffer_ReadyEvent(&ready));
    args.device_complete_events[i] = ready.event;
  }
}

void execute(PJRT_LoadedExecutable_Execute_Args& args) {
  const auto devices = all_devices(args.executable);
  const char* const last = std::getenv("LAST_LAUNCH_OF_HOST_0");
  if (last != nullptr && this_host() == 0 && the_pod->launches == std::atoi(last)) std::_Exit(3);
  const auto launch = std::to_string(the_pod->launches++);
  std::map<int, std::istringstream> told;  // by the other hosts
  {
    const std::lock_guard lock(mutex);
    told[this_host()].str(describe(args));
  }
  the_pod->values.publish("launch " + launch + " of host " + std::to_string(this_host()), told[this_host()].str());
  try {
    for (int host = 0; host < hosts(); ++host)
      if (host != this_host())
        told[host].str(the_pod->values.published("launch " + launch + " of host " + std::to_string(host), kTimeoutMs));
  } catch (const Failed&) {
    return hang(args);
  }
  for (auto& [host, text] : told) {
    if (read(text) != std::to_string(args.options->launch_id) || args.options->launch_id == 0)
      throw Failed("host " + std::to_string(host) + " launches another program");
  }

  const std::lock_guard lock(mutex);
  std::vector<PJRT_Buffer*> made;
  std::vector<std::vector<PJRT_Buffer*>> arguments;
  std::size_t own = 0;
  for (auto* const device : devices) {
    auto& list = arguments.emplace_back();
    const bool is_own = host_of(device) == this_host();
    for (std::size_t k = 0; k < args.num_args; ++k)
      list.push_back(is_own ? args.argument_lists[own][k] : read_value(told[host_of(device)], device, made));
    if (is_own) ++own;
  }
  std::vector<std::vector<PJRT_Buffer*>> results(devices.size(),
                                                 std::vector<PJRT_Buffer*>(outputs_of(args.executable)));
  std::vector<PJRT_Buffer* const*> inputs;
  std::vector<PJRT_Buffer**> outputs;
  for (const auto& list : arguments) inputs.push_back(list.data());
  for (auto& list : results) outputs.push_back(list.data());
  auto on_all = args;
  on_all.num_devices = devices.size();
  on_all.argument_lists = inputs.data();
  on_all.output_lists = outputs.data();
  std::vector<PJRT_Event*> ends(devices.size());
  if (args.device_complete_events != nullptr) on_all.device_complete_events = ends.data();
  check(cpu().PJRT_LoadedExecutable_Execute(&on_all));
  for (auto* const buffer : made) destroy(buffer);
  own = 0;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const bool is_own = host_of(devices[i]) == this_host();
    for (std::size_t k = 0; k < results[i].size(); ++k) {
      const auto name = launch + " " + std::to_string(i) + " " + std::to_string(k);
      if (is_own) {
        args.output_lists[own][k] = results[i][k];
        the_pod->origins[results[i][k]] = {.result = name};
      } else {
        the_pod->of_other_hosts[name] = results[i][k];
      }
    }
    if (args.device_complete_events != nullptr) {
      if (is_own)
        args.device_complete_events[own] = ends[i];
      else
        destroy(ends[i]);
    }
    if (is_own) ++own;
  }
  for (auto& [host, text] : told) {
    if (host == this_host()) continue;
    std::istringstream freed(read(text));
    for (std::string name; std::getline(freed, name, ',');) {
      const auto found = the_pod->of_other_hosts.find(name);
      destroy(found->second);
      the_pod->of_other_hosts.erase(found);
    }
  }
}

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = cpu();
  api.PJRT_Error_Message = [](PJRT_Error_Message_Args* args) {
    const auto* const own = ours(args->error);
    if (own == nullptr) return cpu().PJRT_Error_Message(args);
    args->message = own->message.data();
    args->message_size = own->message.size();
  };
  api.PJRT_Error_GetCode = [](PJRT_Error_GetCode_Args* args) -> PJRT_Error* {
    const auto* const own = ours(args->error);
    if (own == nullptr) return cpu().PJRT_Error_GetCode(args);
    args->code = own->code;
    return nullptr;
  };
  api.PJRT_Error_Destroy = [](PJRT_Error_Destroy_Args* args) {
    auto* const own = ours(args->error);
    if (own == nullptr) return cpu().PJRT_Error_Destroy(args);
    const std::lock_guard lock(mutex);
    errors.erase(args->error);
    delete own;
  };
  api.PJRT_Client_Create = [](PJRT_Client_Create_Args* args) -> PJRT_Error* {
    static constexpr std::string_view kCount = "cpu_device_count";
    PJRT_NamedValue count{.struct_size = PJRT_NamedValue_STRUCT_SIZE,
                          .name = kCount.data(),
                          .name_size = kCount.size(),
                          .type = PJRT_NamedValue_kInt64,
                          .int64_value = std::int64_t{hosts()} * kDevicesOfAHost,
                          .value_size = 1};
    auto of_all = *args;
    of_all.create_options = &count;
    of_all.num_options = 1;
    if (auto* const error = cpu().PJRT_Client_Create(&of_all)) return error;
    args->client = of_all.client;
    the_pod = new Pod{.values = SharedValues(*args), .client = args->client};
    PJRT_Client_AddressableDevices_Args devices{.struct_size = PJRT_Client_AddressableDevices_Args_STRUCT_SIZE,
                                                .client = the_pod->client};
    if (auto* const error = cpu().PJRT_Client_AddressableDevices(&devices)) return error;
    for (std::size_t i = 0; i < devices.num_addressable_devices; ++i)
      if (host_of(devices.addressable_devices[i]) == this_host())
        the_pod->here.push_back(devices.addressable_devices[i]);
    if (!the_pod->values.are_given()) return nullptr;  // no program is launched then
    try {
      the_pod->values.publish("host " + std::to_string(this_host()), "is here");
      for (int host = 0; host < hosts(); ++host) the_pod->values.published("host " + std::to_string(host), kTimeoutMs);
      if (!the_pod->values.has("host 0") || the_pod->values.has("host " + std::to_string(hosts())))
        return error_of("the store does not know what it has", PJRT_Error_Code_INTERNAL);
    } catch (const Failed& failed) {
      return error_of(failed.what(), PJRT_Error_Code_UNAVAILABLE);
    }
    return nullptr;
  };
  api.PJRT_Client_ProcessIndex = [](PJRT_Client_ProcessIndex_Args* args) -> PJRT_Error* {
    args->process_index = this_host();
    return nullptr;
  };
  api.PJRT_Client_AddressableDevices = [](PJRT_Client_AddressableDevices_Args* args) -> PJRT_Error* {
    args->addressable_devices = the_pod->here.data();
    args->num_addressable_devices = the_pod->here.size();
    return nullptr;
  };
  api.PJRT_DeviceDescription_ProcessIndex = [](PJRT_DeviceDescription_ProcessIndex_Args* args) -> PJRT_Error* {
    PJRT_DeviceDescription_Id_Args id{.struct_size = PJRT_DeviceDescription_Id_Args_STRUCT_SIZE,
                                      .device_description = args->device_description};
    cpu().PJRT_DeviceDescription_Id(&id);
    args->process_index = id.id / kDevicesOfAHost;
    return nullptr;
  };
  api.PJRT_LoadedExecutable_AddressableDevices =
      [](PJRT_LoadedExecutable_AddressableDevices_Args* args) -> PJRT_Error* {
    static std::map<PJRT_LoadedExecutable*, std::vector<PJRT_Device*>> lists;
    const std::lock_guard lock(mutex);
    auto& list = lists[args->executable];
    list.clear();
    for (auto* const device : all_devices(args->executable))
      if (host_of(device) == this_host()) list.push_back(device);
    args->addressable_devices = list.data();
    args->num_addressable_devices = list.size();
    return nullptr;
  };
  api.PJRT_Client_BufferFromHostBuffer = [](PJRT_Client_BufferFromHostBuffer_Args* args) -> PJRT_Error* {
    if (auto* const error = cpu().PJRT_Client_BufferFromHostBuffer(args)) return error;
    PJRT_Buffer_OnDeviceSizeInBytes_Args size{.struct_size = PJRT_Buffer_OnDeviceSizeInBytes_Args_STRUCT_SIZE,
                                              .buffer = args->buffer};
    if (auto* const error = cpu().PJRT_Buffer_OnDeviceSizeInBytes(&size)) return error;
    const std::lock_guard lock(mutex);
    the_pod->origins[args->buffer] = {.bytes = {static_cast<const char*>(args->data), size.on_device_size_in_bytes},
                                      .type = args->type,
                                      .sizes = {args->dims, args->dims + args->num_dims}};
    return nullptr;
  };
  api.PJRT_Buffer_Destroy = [](PJRT_Buffer_Destroy_Args* args) -> PJRT_Error* {
    {
      const std::lock_guard lock(mutex);
      const auto found = the_pod->origins.find(args->buffer);
      if (found != the_pod->origins.end()) {
        if (!found->second.result.empty()) the_pod->freed += found->second.result + ",";
        the_pod->origins.erase(found);
      }
    }
    return cpu().PJRT_Buffer_Destroy(args);
  };
  api.PJRT_Event_OnReady = [](PJRT_Event_OnReady_Args* args) -> PJRT_Error* {
    return the_pod->hangs ? nullptr : cpu().PJRT_Event_OnReady(args);
  };
  api.PJRT_Event_IsReady = [](PJRT_Event_IsReady_Args* args) -> PJRT_Error* {
    if (!the_pod->hangs) return cpu().PJRT_Event_IsReady(args);
    args->is_ready = false;
    return nullptr;
  };
  api.PJRT_LoadedExecutable_Execute = [](PJRT_LoadedExecutable_Execute_Args* args) -> PJRT_Error* {
    try {
      execute(*args);
      return nullptr;
    } catch (const std::exception& failed) {
      return error_of(failed.what(), PJRT_Error_Code_UNAVAILABLE);
    }
  };
  return &api;
}
