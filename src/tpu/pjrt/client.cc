#include "tpu/pjrt/client.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <future>
#include <sstream>
#include <thread>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "lockstep/base/error.h"

namespace lockstep::pjrt {

namespace {

constexpr std::array<std::pair<DType, PJRT_Buffer_Type>, kDTypes> kTypes{{{DType::float32, PJRT_Buffer_Type_F32},
                                                                          {DType::float64, PJRT_Buffer_Type_F64},
                                                                          {DType::float16, PJRT_Buffer_Type_F16},
                                                                          {DType::bfloat16, PJRT_Buffer_Type_BF16},
                                                                          {DType::int32, PJRT_Buffer_Type_S32},
                                                                          {DType::int64, PJRT_Buffer_Type_S64},
                                                                          {DType::uint8, PJRT_Buffer_Type_U8},
                                                                          {DType::int8, PJRT_Buffer_Type_S8},
                                                                          {DType::int16, PJRT_Buffer_Type_S16},
                                                                          {DType::boolean, PJRT_Buffer_Type_PRED}}};

PJRT_Buffer_Type type_of(DType dtype) { return kTypes[static_cast<std::size_t>(dtype)].second; }

DType dtype_of(PJRT_Buffer_Type type) {
  const auto* const found = std::find_if(kTypes.begin(), kTypes.end(), [&](auto pair) { return pair.second == type; });
  if (found == kTypes.end()) throw DeviceError(text("a value has PJRT's type ", int{type}, ", which is not supported"));
  return found->first;
}

// The error that a callback returns to the plugin, with what was thrown.
template <class Args>
PJRT_Error* error_of(const Args& args, PJRT_Error_Code code, const std::exception& error) {
  const std::string said = error.what();
  return (*args.callback_error)(code, said.data(), said.size());
}

template <class Args>
void give(Args& args, const std::string& value) {
  args.value = new char[value.size()];
  std::copy(value.begin(), value.end(), args.value);
  args.value_size = value.size();
  args.value_deleter_callback = [](char* bytes) { delete[] bytes; };
}

PJRT_Error* get_value(PJRT_KeyValueGetCallback_Args* args) {
  const auto& store = *static_cast<const Store*>(args->user_arg);
  try {
    give(*args, store.get({args->key, args->key_size},
                          Deadline::after(std::chrono::milliseconds(std::max(0, args->timeout_in_ms)))));
    return nullptr;
  } catch (const DeadlineExceeded& error) {
    return error_of(*args, PJRT_Error_Code_DEADLINE_EXCEEDED, error);
  } catch (const std::exception& error) {
    return error_of(*args, PJRT_Error_Code_UNAVAILABLE, error);
  }
}

// The deadline of the store's answer to a call that does not wait for a key.
Deadline of_answer() { return Deadline::after(std::chrono::seconds(60)); }

PJRT_Error* try_to_get_value(PJRT_KeyValueTryGetCallback_Args* args) {
  const auto& store = *static_cast<const Store*>(args->user_arg);
  const std::string key(args->key, args->key_size);
  try {
    const auto value = store.compare_set(key, "", "", of_answer());
    if (value.empty()) return error_of(*args, PJRT_Error_Code_NOT_FOUND, Error(text("the store has no ", key)));
    give(*args, value);
    return nullptr;
  } catch (const std::exception& error) {
    return error_of(*args, PJRT_Error_Code_UNAVAILABLE, error);
  }
}

PJRT_Error* put_value(PJRT_KeyValuePutCallback_Args* args) {
  const auto& store = *static_cast<const Store*>(args->user_arg);
  try {
    store.set({args->key, args->key_size}, {args->value, args->value_size}, of_answer());
    return nullptr;
  } catch (const std::exception& error) {
    return error_of(*args, PJRT_Error_Code_UNAVAILABLE, error);
  }
}

Device describe(const Plugin& plugin, PJRT_Device* handle) {
  PJRT_Device_GetDescription_Args of{.struct_size = PJRT_Device_GetDescription_Args_STRUCT_SIZE, .device = handle};
  plugin.call(&PJRT_Api::PJRT_Device_GetDescription, of, "describe a device");
  PJRT_DeviceDescription_Id_Args id{.struct_size = PJRT_DeviceDescription_Id_Args_STRUCT_SIZE,
                                    .device_description = of.device_description};
  plugin.call(&PJRT_Api::PJRT_DeviceDescription_Id, id, "a device's number");
  PJRT_DeviceDescription_Kind_Args kind{.struct_size = PJRT_DeviceDescription_Kind_Args_STRUCT_SIZE,
                                        .device_description = of.device_description};
  plugin.call(&PJRT_Api::PJRT_DeviceDescription_Kind, kind, "a device's kind");
  PJRT_DeviceDescription_ProcessIndex_Args process{.struct_size = PJRT_DeviceDescription_ProcessIndex_Args_STRUCT_SIZE,
                                                   .device_description = of.device_description};
  plugin.call(&PJRT_Api::PJRT_DeviceDescription_ProcessIndex, process, "a device's process");
  return {handle, id.id, process.process_index, {kind.device_kind, kind.device_kind_size}};
}

}  // namespace

std::int64_t Shape::elements() const {
  std::int64_t product = 1;
  for (const auto size : sizes) product *= size;
  return product;
}

Buffer::Buffer(std::shared_ptr<const Client> client, PJRT_Buffer* buffer) : buffer_(buffer, {std::move(client)}) {}

Shape Buffer::shape() const {
  const auto& plugin = buffer_.get_deleter().plugin();
  PJRT_Buffer_ElementType_Args type{.struct_size = PJRT_Buffer_ElementType_Args_STRUCT_SIZE, .buffer = handle()};
  plugin.call(&PJRT_Api::PJRT_Buffer_ElementType, type, "a value's dtype");
  PJRT_Buffer_Dimensions_Args sizes{.struct_size = PJRT_Buffer_Dimensions_Args_STRUCT_SIZE, .buffer = handle()};
  plugin.call(&PJRT_Api::PJRT_Buffer_Dimensions, sizes, "a value's sizes");
  return {dtype_of(type.type), {sizes.dims, sizes.dims + sizes.num_dims}};
}

void Buffer::copy_to_host(void* to, std::size_t bytes, Deadline deadline) const {
  const auto& plugin = buffer_.get_deleter().plugin();
  const auto shape = this->shape();
  if (bytes != shape.bytes())
    throw InvalidArgument(text("copy_to_host: the memory has ", bytes, " bytes, the value ", shape.bytes()));
  std::vector<std::int64_t> minor_to_major;
  for (auto i = static_cast<std::int64_t>(shape.sizes.size()); i-- > 0;) minor_to_major.push_back(i);
  PJRT_Buffer_MemoryLayout layout{.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE};
  layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  layout.tiled = {.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE,
                  .minor_to_major = minor_to_major.data(),
                  .minor_to_major_size = minor_to_major.size()};
  const auto copied = std::make_shared<std::vector<char>>(bytes);  // which the plugin may write to after the deadline
  PJRT_Buffer_ToHostBuffer_Args args{.struct_size = PJRT_Buffer_ToHostBuffer_Args_STRUCT_SIZE,
                                     .src = handle(),
                                     .host_layout = &layout,
                                     .dst = copied->data(),
                                     .dst_size = bytes};
  plugin.call(&PJRT_Api::PJRT_Buffer_ToHostBuffer, args, "copy a value from a device");
  Event(plugin, args.event).wait(deadline, "copy a value from a device", copied);
  std::copy(copied->begin(), copied->end(), static_cast<char*>(to));
}

// PJRT_Client_Create has no deadline, so a thread of its own calls it.
std::shared_ptr<Client> Client::create(const Plugin& plugin, Deadline deadline, const Options& options,
                                       std::optional<Store> store) {
  const std::shared_ptr<Client> client(new Client(plugin, std::move(store)));
  const WaitingNotice notice(
      text(plugin.path(), " opens its devices; on a TPU of several hosts it waits for a process on each of them"),
      deadline);
  std::packaged_task<void()> open([client, options] { client->open(options); });
  auto opened = open.get_future();
  std::thread thread(std::move(open));
  if (opened.wait_until(deadline.time()) == std::future_status::timeout) {
    thread.detach();
    throw DeadlineExceeded(text(plugin.path(), ": open the devices"), deadline.waited(), {}, kNoAnswer);
  }
  thread.join();
  opened.get();
  return client;
}

void Client::open(const Options& options) {
  const auto values = named_values(options);
  PJRT_Client_Create_Args args{.struct_size = PJRT_Client_Create_Args_STRUCT_SIZE,
                               .create_options = values.data(),
                               .num_options = values.size()};
  if (store_) {
    args.kv_get_callback = get_value;
    args.kv_put_callback = put_value;
    args.kv_try_get_callback = try_to_get_value;
    args.kv_get_user_arg = args.kv_put_user_arg = args.kv_try_get_user_arg = &*store_;
  }
  try {
    plugin_.call(&PJRT_Api::PJRT_Client_Create, args, text(plugin_.path(), ": the plugin cannot use its devices"));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of the plugin itself: it reads an option as another type
    std::vector<std::string> names;
    for (const auto& [name, value] : options) names.push_back(name);
    throw DeviceError(
        text(plugin_.path(), ": the plugin does not take its options (", join(names), "): ", error.what()));
  }
  client_ = args.client;
  PJRT_Client_PlatformName_Args name{.struct_size = PJRT_Client_PlatformName_Args_STRUCT_SIZE, .client = args.client};
  plugin_.call(&PJRT_Api::PJRT_Client_PlatformName, name, "the plugin's platform");
  platform_.assign(name.platform_name, name.platform_name_size);
  PJRT_Client_AddressableDevices_Args here{.struct_size = PJRT_Client_AddressableDevices_Args_STRUCT_SIZE,
                                           .client = args.client};
  plugin_.call(&PJRT_Api::PJRT_Client_AddressableDevices, here, "list the devices");
  for (std::size_t i = 0; i < here.num_addressable_devices; ++i)
    devices_.push_back(describe(plugin_, here.addressable_devices[i]));
}

Client::~Client() {
  if (client_ != nullptr) plugin_.destroy(&PJRT_Api::PJRT_Client_Destroy, client_);
}

std::string Client::version() const {
  PJRT_Client_PlatformVersion_Args args{.struct_size = PJRT_Client_PlatformVersion_Args_STRUCT_SIZE, .client = client_};
  plugin_.call(&PJRT_Api::PJRT_Client_PlatformVersion, args, "the plugin's version");
  return {args.platform_version, args.platform_version_size};
}

int Client::process() const {
  PJRT_Client_ProcessIndex_Args args{.struct_size = PJRT_Client_ProcessIndex_Args_STRUCT_SIZE, .client = client_};
  plugin_.call(&PJRT_Api::PJRT_Client_ProcessIndex, args, "this process's number");
  return args.process_index;
}

std::vector<Device> Client::devices_of_all_processes() const {
  PJRT_Client_Devices_Args args{.struct_size = PJRT_Client_Devices_Args_STRUCT_SIZE, .client = client_};
  plugin_.call(&PJRT_Api::PJRT_Client_Devices, args, "list all processes' devices");
  std::vector<Device> devices;
  for (std::size_t i = 0; i < args.num_devices; ++i) devices.push_back(describe(plugin_, args.devices[i]));
  return devices;
}

void Client::fail_waiters(const std::string& reason) const {
  {
    const MutexLock lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  }
  if (store_) store_->fail_waiters("", reason, Deadline::after(std::chrono::seconds(10)));
}

std::string Client::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

Buffer Client::copy_to_device(const void* data, const Shape& shape, const Device& device) const {
  PJRT_Client_BufferFromHostBuffer_Args args{.struct_size = PJRT_Client_BufferFromHostBuffer_Args_STRUCT_SIZE,
                                             .client = client_,
                                             .data = data,
                                             .type = type_of(shape.dtype),
                                             .dims = shape.sizes.data(),
                                             .num_dims = shape.sizes.size(),
                                             .host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall,
                                             .device = device.handle};
  plugin_.call(&PJRT_Api::PJRT_Client_BufferFromHostBuffer, args, text("copy a value to device ", device.id));
  const Event data_is_read(plugin_, args.done_with_host_buffer);  // which was so when the call returned
  return {shared_from_this(), args.buffer};
}

namespace {

void set(PJRT_NamedValue& to, const std::string& value) {
  to.type = PJRT_NamedValue_kString;
  to.string_value = value.c_str();
  to.value_size = value.size();
}
void set(PJRT_NamedValue& to, std::int64_t value) {
  to.type = PJRT_NamedValue_kInt64;
  to.int64_value = value;
}
void set(PJRT_NamedValue& to, bool value) {
  to.type = PJRT_NamedValue_kBool;
  to.bool_value = value;
}
void set(PJRT_NamedValue& to, float value) {
  to.type = PJRT_NamedValue_kFloat;
  to.float_value = value;
}

Options::value_type option_in(const std::string& item) {
  const auto equals = item.find('=');
  if (equals == 0 || equals == std::string::npos)
    throw InvalidArgument(text("PJRT_PLUGIN_OPTIONS: \"", item, "\" is not name=value, such as cpu_device_count=8"));
  const auto name = item.substr(0, equals), value = item.substr(equals + 1);
  if (const auto number = whole_number(value)) return {name, *number};
  if (value == "true" || value == "false") return {name, value == "true"};
  return {name, value};
}

}  // namespace

Options plugin_options(const Options& asked) {
  const char* const set = std::getenv("PJRT_PLUGIN_OPTIONS");
  if (!asked.empty() || set == nullptr) return asked;
  Options options;
  std::istringstream items(set);
  for (std::string item; std::getline(items, item, ',');) options.push_back(option_in(item));
  return options;
}

std::vector<PJRT_NamedValue> named_values(const Options& options) {
  std::vector<PJRT_NamedValue> values;
  for (const auto& [name, value] : options) {
    values.push_back({.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = name.c_str(), .name_size = name.size()});
    values.back().value_size = 1;
    std::visit([&](const auto& given) { set(values.back(), given); }, value);
  }
  return values;
}

}  // namespace lockstep::pjrt
