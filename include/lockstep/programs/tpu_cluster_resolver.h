// Chooses the TPU of a program. The chips are used through a PJRT plugin (https://openxla.org/xla/pjrt), which for TPUs
// is libtpu.so; plugins for other devices serve as well. Follows tf.distribute.cluster_resolver.TPUClusterResolver.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/cluster/cluster.h"

namespace lockstep {

// Options of the client that the plugin documents, such as {"cpu_device_count", std::int64_t{8}}.
using PluginOptions = std::vector<std::pair<std::string, std::variant<std::string, std::int64_t, bool, float>>>;

struct TPUClusterResolverOptions {
  // The plugin's file. Empty: that of the environment's PJRT_PLUGIN_LIBRARY_PATH or TPU_LIBRARY_PATH, else libtpu.so,
  // as dlopen finds it.
  std::string plugin = {};
  PluginOptions plugin_options = {};  // empty: the environment's PJRT_PLUGIN_OPTIONS, as "cpu_device_count=8"

  // The processes that use a TPU of several hosts together, one on each. Empty: what the environment says
  // (resolve_cluster); without any of its variables, this process uses the chips of its host alone.
  std::optional<Cluster> cluster = {};

  // Until all processes have come; then until all have opened their devices.
  double start_timeout_seconds = kStartTimeoutSeconds;
};

// The TPU that a program uses. A value.
class TPUClusterResolver {
 public:
  // `tpu`: empty or "local" for this machine's chips, or their name, as the environment's TPU_NAME gives it. Throws
  // InvalidArgument for another name: a program uses the chips of its own machine, and with other processes those of
  // theirs. Throws it also where start_timeout_seconds is not above 0.
  explicit TPUClusterResolver(std::string tpu = "", TPUClusterResolverOptions options = {});

  const std::string& tpu() const { return tpu_; }
  const TPUClusterResolverOptions& options() const { return options_; }

 private:
  std::string tpu_;
  TPUClusterResolverOptions options_;
};

struct TPUTopology {
  std::string kind;                         // of the devices, in the plugin's words: "TPU v5 lite"
  int num_devices = 0;                      // of all processes
  int num_tasks = 1;                        // processes, one on each host
  std::shared_ptr<const void> system = {};  // keeps the devices open
};

// Loads the plugin and opens the devices, which stay open as long as a strategy, or the result, uses them. A
// TPUStrategy does so by itself; this call before tells which devices there are. The call, or the first TPUStrategy,
// must come before the process's first backward. Collective over the processes of a TPU of several hosts: keep the
// result in all of them, or in none. Throws DeviceError after the first backward, without a plugin or a device, and
// where the plugin's devices are not those of the processes. Throws ClusterError as MultiWorkerMirroredStrategy, and
// where another process failed. Throws DeadlineExceeded, which names processes that have not come, or the plugin that
// has not opened its devices.
TPUTopology initialize_tpu_system(const TPUClusterResolver& resolver = TPUClusterResolver());

}  // namespace lockstep
