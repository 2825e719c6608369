#include "strategy/devices.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::strategy {

namespace {

constexpr int kMostLogicalCpus = 1024;

// Returns 0 where LibTorch's part for CUDA is not linked, or there is no driver.
int gpu_count() { return static_cast<int>(at::detail::getCUDAHooks().deviceCount()); }

}  // namespace

void check_device(const std::string& name) {
  const auto colon = name.find(':');
  const auto kind = name.substr(0, colon);
  const int index = colon == std::string::npos ? -1 : whole_number<int>(name.substr(colon + 1)).value_or(-1);
  if ((kind != "cpu" && kind != "cuda") || index < 0) {
    throw InvalidArgument(
        text("device \"", name, "\" is no device's name; names are cpu:0, cpu:1, ... and cuda:0, cuda:1, ..."));
  }
  if (kind == "cuda" && index >= gpu_count()) {
    throw InvalidArgument(text("device ", name, " does not exist: LibTorch can use ", gpu_count(), " GPU(s) here",
                               gpu_count() == 0 ? "; is this a build with the preset cuda?" : ""));
  }
  if (index >= kMostLogicalCpus) {
    throw InvalidArgument(
        text("device ", name, " does not exist; logical CPUs are cpu:0 to cpu:", kMostLogicalCpus - 1));
  }
}

std::vector<std::string> logical_cpus(int count) {
  require(count >= 1 && count <= kMostLogicalCpus, "the number of replicas", count, "from 1 to ", kMostLogicalCpus);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(text("cpu:", i));
  return names;
}

std::vector<std::string> default_devices(cluster::CpuPartition partition) {
  std::vector<std::string> names;
  const int gpus = gpu_count();
  if (gpus > 0 && gpus < partition.size) return {text("cuda:", partition.rank % gpus)};
  for (int i = gpus * partition.rank / partition.size; i < gpus * (partition.rank + 1) / partition.size; ++i) {
    names.push_back(text("cuda:", i));
  }
  return names.empty() ? logical_cpus(partition.usable_cpu_count()) : names;
}

std::string default_device() { return gpu_count() > 0 ? "cuda:0" : "cpu:0"; }

c10::Device torch_device(const std::string& name) {
  return name.starts_with("cuda") ? c10::Device(name) : c10::Device(c10::kCPU);
}

void check(const std::string& strategy, const ElasticOptions& options) {
  const auto check = [&](bool holds, const char* option, auto value, const auto&... allowed) {
    require(holds, text(strategy, ": elastic.", option), value, allowed...);
  };
  check(options.min_workers >= 1, "min_workers", options.min_workers, "1 or more");
  check(options.regroup_seconds > 0, "regroup_seconds", options.regroup_seconds, "above 0");
  check(options.lost_host_seconds >= 3 && options.lost_host_seconds <= kLongestLostHostSeconds, "lost_host_seconds",
        options.lost_host_seconds, "from 3 to ", kLongestLostHostSeconds);
  check(options.join_seconds >= 0, "join_seconds", options.join_seconds, "0 or more");
  const auto& batch = options.worker_batch;
  if (!batch) return;
  check(batch->learning_rate_workers >= 1, "worker_batch.learning_rate_workers", batch->learning_rate_workers,
        "1 or more");
  if (!batch->scaling) throw InvalidArgument(text(strategy, ": elastic.worker_batch.scaling is null"));
}

}  // namespace lockstep::strategy
