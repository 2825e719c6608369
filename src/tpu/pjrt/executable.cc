#include "tpu/pjrt/executable.h"

#include <string_view>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::pjrt {
namespace {

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes.push_back(static_cast<char>(value | 128));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

// Field `number` of a serialized message, which has a length.
std::string field(std::uint64_t number, const std::string& value) {
  return varint(number << 3 | 2) + varint(value.size()) + value;
}

// A number in field `number`.
std::string field(std::uint64_t number, int value) {
  return varint(number << 3) + varint(static_cast<std::uint64_t>(value));
}

// A serialized xla.DeviceAssignmentProto: replica_count (1), computation_count (2), and for each computation
// (3) its replicas' devices (1).
std::string assignment(const std::vector<int>& devices) {
  std::string ids;
  for (const int id : devices) ids += varint(static_cast<std::uint64_t>(id));
  return field(1, static_cast<int>(devices.size())) + field(2, 1) + field(3, field(1, ids));
}

// A serialized xla.CompileOptionsProto: executable_build_options (3) with num_replicas (4), num_partitions (5) and
// device_assignment (9), and env_option_overrides (7), a map to OptionOverrideProto, whose bool is field 2.
std::string encode(const CompileOptions& options) {
  auto build = field(4, options.replicas) + field(5, 1);
  if (!options.devices.empty()) build += field(9, assignment(options.devices));
  auto encoded = field(3, build);
  for (const auto& [name, on] : options.switches) encoded += field(7, field(1, name) + field(2, field(2, on ? 1 : 0)));
  return encoded;
}

PJRT_Program program_of(std::string& stablehlo) {
  constexpr std::string_view kFormat = "mlir";
  return {.struct_size = PJRT_Program_STRUCT_SIZE,
          .code = stablehlo.data(),
          .code_size = stablehlo.size(),
          .format = kFormat.data(),
          .format_size = kFormat.size()};
}

PJRT_Executable* description_of(const Plugin& plugin, PJRT_LoadedExecutable* loaded) {
  PJRT_LoadedExecutable_GetExecutable_Args args{.struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE,
                                                .loaded_executable = loaded};
  plugin.call(&PJRT_Api::PJRT_LoadedExecutable_GetExecutable, args, "describe a program");
  return args.executable;
}

std::vector<Device> devices_of(const Client& client, PJRT_LoadedExecutable* loaded) {
  PJRT_LoadedExecutable_AddressableDevices_Args args{
      .struct_size = PJRT_LoadedExecutable_AddressableDevices_Args_STRUCT_SIZE, .executable = loaded};
  client.plugin().call(&PJRT_Api::PJRT_LoadedExecutable_AddressableDevices, args, "a program's devices");
  std::vector<Device> devices;
  for (std::size_t i = 0; i < args.num_addressable_devices; ++i) {
    for (const auto& device : client.devices())
      if (device.handle == args.addressable_devices[i]) devices.push_back(device);
  }
  return devices;
}

}  // namespace

Program::Program(const Plugin& plugin, PJRT_Executable* executable) : executable_(executable, {&plugin}) {}

std::size_t Program::outputs() const {
  PJRT_Executable_NumOutputs_Args args{.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE,
                                       .executable = executable_.get()};
  plugin().call(&PJRT_Api::PJRT_Executable_NumOutputs, args, "a program's outputs");
  return args.num_outputs;
}

MemoryNeeds Program::memory() const {
  PJRT_Executable_GetCompiledMemoryStats_Args args{
      .struct_size = PJRT_Executable_GetCompiledMemoryStats_Args_STRUCT_SIZE, .executable = executable_.get()};
  plugin().call(&PJRT_Api::PJRT_Executable_GetCompiledMemoryStats, args, "a program's memory");
  return {args.argument_size_in_bytes, args.output_size_in_bytes, args.alias_size_in_bytes, args.temp_size_in_bytes,
          args.generated_code_size_in_bytes};
}

double Program::flops() const {
  PJRT_Executable_GetCostAnalysis_Args args{.struct_size = PJRT_Executable_GetCostAnalysis_Args_STRUCT_SIZE,
                                            .executable = executable_.get()};
  plugin().call(&PJRT_Api::PJRT_Executable_GetCostAnalysis, args, "a program's cost");
  for (std::size_t i = 0; i < args.num_properties; ++i) {
    const auto& property = args.properties[i];
    if (std::string_view(property.name, property.name_size) == "flops" && property.type == PJRT_NamedValue_kFloat)
      return property.float_value;
  }
  return 0;
}

std::string Program::serialize() const {
  PJRT_Executable_Serialize_Args args{.struct_size = PJRT_Executable_Serialize_Args_STRUCT_SIZE,
                                      .executable = executable_.get()};
  plugin().call(&PJRT_Api::PJRT_Executable_Serialize, args, "serialize a program");
  const std::unique_ptr<PJRT_SerializedExecutable, void (*)(PJRT_SerializedExecutable*)> backing(
      args.serialized_executable, args.serialized_executable_deleter);
  return {args.serialized_bytes, args.serialized_bytes_size};
}

Executable::Executable(std::shared_ptr<const Client> of, PJRT_LoadedExecutable* executable)
    : executable_(executable, {std::move(of)}),
      program_(client()->plugin(), description_of(client()->plugin(), executable)),
      devices_(devices_of(*client(), executable)),
      outputs_(program_.outputs()) {}

Executable Executable::compile(std::shared_ptr<const Client> client, std::string stablehlo,
                               const CompileOptions& options) {
  const auto program = program_of(stablehlo);
  const auto encoded = encode(options);
  PJRT_Client_Compile_Args args{.struct_size = PJRT_Client_Compile_Args_STRUCT_SIZE,
                                .client = client->handle(),
                                .program = &program,
                                .compile_options = encoded.data(),
                                .compile_options_size = encoded.size()};
  client->plugin().call(&PJRT_Api::PJRT_Client_Compile, args, "compile a program");
  return {std::move(client), args.executable};
}

Executable Executable::load(std::shared_ptr<const Client> client, const std::string& serialized) {
  PJRT_Executable_DeserializeAndLoad_Args args{.struct_size = PJRT_Executable_DeserializeAndLoad_Args_STRUCT_SIZE,
                                               .client = client->handle(),
                                               .serialized_executable = serialized.data(),
                                               .serialized_executable_size = serialized.size()};
  client->plugin().call(&PJRT_Api::PJRT_Executable_DeserializeAndLoad, args, "load a compiled program");
  return {std::move(client), args.loaded_executable};
}

Executable::Run Executable::run(const std::vector<std::vector<const Buffer*>>& arguments, int launch) const {
  if (arguments.size() != devices_.size())
    throw InvalidArgument(
        text("run: there are ", arguments.size(), " lists of arguments for ", devices_.size(), " devices"));
  std::vector<std::vector<PJRT_Buffer*>> handles, outputs(arguments.size(), std::vector<PJRT_Buffer*>(outputs_));
  for (const auto& list : arguments) {
    auto& of_device = handles.emplace_back();
    for (const auto* const buffer : list) of_device.push_back(buffer->handle());
    if (list.size() != arguments[0].size())
      throw InvalidArgument(
          text("run: device ", handles.size() - 1, " has ", list.size(), " arguments, device 0 ", arguments[0].size()));
  }
  std::vector<PJRT_Buffer* const*> inputs;
  std::vector<PJRT_Buffer**> results;
  for (const auto& of_device : handles) inputs.push_back(of_device.data());
  for (auto& of_device : outputs) results.push_back(of_device.data());
  PJRT_ExecuteOptions options{.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE, .launch_id = launch};
  std::vector<PJRT_Event*> ends(arguments.size());
  PJRT_LoadedExecutable_Execute_Args args{.struct_size = PJRT_LoadedExecutable_Execute_Args_STRUCT_SIZE,
                                          .executable = executable_.get(),
                                          .options = &options,
                                          .argument_lists = inputs.data(),
                                          .num_devices = inputs.size(),
                                          .num_args = arguments[0].size(),
                                          .output_lists = results.data(),
                                          .device_complete_events = ends.data()};
  client()->plugin().call(&PJRT_Api::PJRT_LoadedExecutable_Execute, args, "run a program");
  Run run{.outputs = std::vector<std::vector<Buffer>>(outputs.size())};
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (auto* const output : outputs[i]) run.outputs[i].emplace_back(client(), output);
    run.ends.emplace_back(client()->plugin(), ends[i]);
  }
  return run;
}

Topology Topology::create(const Plugin& plugin, const std::string& name, const Options& options) {
  const auto values = named_values(options);
  PJRT_TopologyDescription_Create_Args args{.struct_size = PJRT_TopologyDescription_Create_Args_STRUCT_SIZE,
                                            .topology_name = name.data(),
                                            .topology_name_size = name.size(),
                                            .create_options = values.data(),
                                            .num_options = values.size()};
  plugin.call(&PJRT_Api::PJRT_TopologyDescription_Create, args, text("the topology ", name, " by ", plugin.path()));
  return {plugin, args.topology};
}

std::vector<PJRT_DeviceDescription*> Topology::descriptions() const {
  PJRT_TopologyDescription_GetDeviceDescriptions_Args args{
      .struct_size = PJRT_TopologyDescription_GetDeviceDescriptions_Args_STRUCT_SIZE, .topology = topology_.get()};
  plugin().call(&PJRT_Api::PJRT_TopologyDescription_GetDeviceDescriptions, args, "a topology's devices");
  return {args.descriptions, args.descriptions + args.num_descriptions};
}

int Topology::devices() const { return static_cast<int>(descriptions().size()); }

std::string Topology::kind() const {
  const auto all = descriptions();
  if (all.empty()) return "";
  PJRT_DeviceDescription_Kind_Args args{.struct_size = PJRT_DeviceDescription_Kind_Args_STRUCT_SIZE,
                                        .device_description = all[0]};
  plugin().call(&PJRT_Api::PJRT_DeviceDescription_Kind, args, "a device's kind");
  return {args.device_kind, args.device_kind_size};
}

Program Topology::compile(std::string stablehlo, const CompileOptions& options) const {
  const auto program = program_of(stablehlo);
  const auto encoded = encode(options);
  PJRT_Compile_Args args{.struct_size = PJRT_Compile_Args_STRUCT_SIZE,
                         .topology = topology_.get(),
                         .program = &program,
                         .compile_options = encoded.data(),
                         .compile_options_size = encoded.size()};
  plugin().call(&PJRT_Api::PJRT_Compile, args, "compile a program ahead of time");
  return {plugin(), args.executable};
}

}  // namespace lockstep::pjrt
