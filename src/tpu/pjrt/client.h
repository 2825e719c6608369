// A plugin's devices, and values on them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "lockstep/base/buffer.h"
#include "lockstep/base/deadline.h"
#include "lockstep/cluster/store.h"
#include "tpu/pjrt/plugin.h"

namespace lockstep::pjrt {

// Options that the plugin documents, such as {"cpu_device_count", 8}.
using Options = std::vector<std::pair<std::string, std::variant<std::string, std::int64_t, bool, float>>>;

struct Device {
  PJRT_Device* handle = nullptr;
  int id = 0;        // among all processes' devices
  int process = 0;   // whose it is
  std::string kind;  // "cpu", "TPU v5 lite"
};

// Sizes and dtype of a value; its elements lie in row-major order.
struct Shape {
  DType dtype = DType::float32;
  std::vector<std::int64_t> sizes = {};

  std::int64_t elements() const;
  std::size_t bytes() const { return static_cast<std::size_t>(elements()) * size_of(dtype); }
  bool operator==(const Shape&) const = default;
};

class Client;

// A value on a device. Moves, and frees the device's memory when it ends. Keeps its Client.
class Buffer {
 public:
  Buffer(std::shared_ptr<const Client> client, PJRT_Buffer* buffer);

  Shape shape() const;

  // Copies the value into `to`, of as many bytes as the shape has. Waits until it has been computed. Throws DeviceError
  // where its computation failed, DeadlineExceeded, or InvalidArgument where `bytes` is another number.
  void copy_to_host(void* to, std::size_t bytes, Deadline deadline) const;

  PJRT_Buffer* handle() const { return buffer_.get(); }

 private:
  std::unique_ptr<PJRT_Buffer, Destroy<&PJRT_Api::PJRT_Buffer_Destroy, std::shared_ptr<const Client>>> buffer_;
};

// The devices that this process may use. Whatever is made of it keeps it, so that the plugin's client ends last. Any
// thread may call.
class Client : public std::enable_shared_from_this<Client> {
 public:
  // `store`: through which the plugins of several processes find each other. Throws DeviceError with the plugin's text,
  // or DeadlineExceeded; a thread then stays in the plugin until the process ends.
  static std::shared_ptr<Client> create(const Plugin& plugin, Deadline deadline, const Options& options = {},
                                        std::optional<Store> store = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const Plugin& plugin() const { return plugin_; }
  const std::string& platform() const { return platform_; }        // "cpu", "tpu"
  std::string version() const;                                     // of the plugin, in its words
  int process() const;                                             // this one's number in the job
  const std::vector<Device>& devices() const { return devices_; }  // of this process
  std::vector<Device> devices_of_all_processes() const;

  // Begins to copy a value to a device; `data` may change when it returns.
  Buffer copy_to_device(const void* data, const Shape& shape, const Device& device) const;

  // Among others, whose values the plugin waits for.
  bool has_other_processes() const { return store_.has_value(); }

  // Says that another process has failed: waiting for values that it has not told fails with `reason`. The plugin may
  // not be used with others any more.
  void fail_waiters(const std::string& reason) const;

  std::string failure() const;  // that reason; empty: none has failed

  PJRT_Client* handle() const { return client_; }

 private:
  Client(const Plugin& plugin, std::optional<Store> store) : plugin_(plugin), store_(std::move(store)) {}
  void open(const Options& options);

  const Plugin& plugin_;
  std::optional<Store> store_;  // which the plugin's threads use
  PJRT_Client* client_ = nullptr;
  std::string platform_;
  std::vector<Device> devices_;
  mutable Mutex mutex_;
  mutable std::string failure_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Options as the C API takes them.

// The values point to `options`.
std::vector<PJRT_NamedValue> named_values(const Options& options);

// Returns the options of a plugin's client: `asked`, or where those are none, the environment's PJRT_PLUGIN_OPTIONS.
// These are such as "cpu_device_count=8,name=value": whole numbers, true or false, and else text. Throws
// InvalidArgument for what is not made of names and values.
Options plugin_options(const Options& asked);

}  // namespace lockstep::pjrt
