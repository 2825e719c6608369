// For pod_pjrt_plugin.cc: its errors, and the values that its processes share.
#pragma once

#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace pod {

constexpr std::size_t kLongestValue = 512 << 10;

// The plugin for CPUs.
inline const PJRT_Api& cpu() {
  static const PJRT_Api& api =
      *reinterpret_cast<const PJRT_Api* (*)()>(dlsym(dlopen(CPU_PLUGIN, RTLD_NOW | RTLD_LOCAL), "GetPjrtApi"))();
  return api;
}

// Errors of this plugin, beside those of the plugin for CPUs.
struct PodError {
  std::string message;
  PJRT_Error_Code code = PJRT_Error_Code_UNAVAILABLE;
};

inline std::recursive_mutex mutex;  // of all that follows, and of the pod; one client a process
inline std::set<const PJRT_Error*> errors;

inline PJRT_Error* error_of(const std::string& message, PJRT_Error_Code code) {
  const std::lock_guard lock(mutex);
  auto* const error = reinterpret_cast<PJRT_Error*>(new PodError{message, code});
  errors.insert(error);
  return error;
}

inline PodError* ours(const PJRT_Error* error) {
  const std::lock_guard lock(mutex);
  return errors.contains(error) ? reinterpret_cast<PodError*>(const_cast<PJRT_Error*>(error)) : nullptr;
}

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(PJRT_Error* error) {
  if (error == nullptr) return;
  PodError* const own = ours(error);
  std::string message = own != nullptr ? own->message : "the plugin for CPUs failed";
  if (own != nullptr) {
    const std::lock_guard lock(mutex);
    errors.erase(error);
    delete own;
  }
  throw Failed(message);
}

inline PJRT_Error* failed_with(PJRT_Error_Code code, const char* message, std::size_t size) {
  return error_of({message, size}, code);
}

// By the callbacks that the plugin's client was made with.
class SharedValues {
 public:
  SharedValues() = default;
  explicit SharedValues(const PJRT_Client_Create_Args& callbacks) : callbacks_(callbacks) {}

  bool are_given() const {
    return callbacks_.kv_put_callback != nullptr && callbacks_.kv_get_callback != nullptr &&
           callbacks_.kv_try_get_callback != nullptr;
  }

  bool has(const std::string& key) const {
    PJRT_CallbackError failed = [](PJRT_Error_Code code, const char* message, std::size_t size) {
      return code == PJRT_Error_Code_NOT_FOUND ? nullptr : error_of({message, size}, code);
    };
    PJRT_KeyValueTryGetCallback_Args args{.struct_size = PJRT_KeyValueTryGetCallback_Args_STRUCT_SIZE,
                                          .key = key.data(),
                                          .key_size = key.size(),
                                          .callback_error = &failed,
                                          .user_arg = callbacks_.kv_try_get_user_arg};
    check(callbacks_.kv_try_get_callback(&args));
    if (args.value == nullptr) return false;
    args.value_deleter_callback(args.value);
    return true;
  }

  // Values of any length.
  void publish(const std::string& key, const std::string& value) const {
    const auto pieces = value.size() / kLongestValue + 1;
    put(key, std::to_string(pieces));
    for (std::size_t i = 0; i < pieces; ++i)
      put(key + "/" + std::to_string(i), "." + value.substr(i * kLongestValue, kLongestValue));
  }
  std::string published(const std::string& key, int timeout_ms) const {
    std::string value;
    const auto pieces = std::stoull(get(key, timeout_ms));
    for (std::size_t i = 0; i < pieces; ++i) value += get(key + "/" + std::to_string(i), timeout_ms).substr(1);
    return value;
  }

 private:
  void put(const std::string& key, const std::string& value) const {
    PJRT_CallbackError failed = failed_with;
    PJRT_KeyValuePutCallback_Args args{.struct_size = PJRT_KeyValuePutCallback_Args_STRUCT_SIZE,
                                       .key = key.data(),
                                       .key_size = key.size(),
                                       .value = value.data(),
                                       .value_size = value.size(),
                                       .callback_error = &failed,
                                       .user_arg = callbacks_.kv_put_user_arg};
    check(callbacks_.kv_put_callback(&args));
  }

  std::string get(const std::string& key, int timeout_ms) const {
    PJRT_CallbackError failed = failed_with;
    PJRT_KeyValueGetCallback_Args args{.struct_size = PJRT_KeyValueGetCallback_Args_STRUCT_SIZE,
                                       .key = key.data(),
                                       .key_size = key.size(),
                                       .timeout_in_ms = timeout_ms,
                                       .callback_error = &failed,
                                       .user_arg = callbacks_.kv_get_user_arg};
    check(callbacks_.kv_get_callback(&args));
    std::string value(args.value, args.value_size);
    args.value_deleter_callback(args.value);
    return value;
  }

  PJRT_Client_Create_Args callbacks_ = {};
};

}  // namespace pod
