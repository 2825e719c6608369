// Devices by name: "cpu:0", "cpu:1", ... are logical CPUs, "cuda:0", ... GPUs.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "cluster/cpu_partition.h"
#include "lockstep/strategy/multi_worker_mirrored_strategy.h"

namespace lockstep::strategy {

// Throws InvalidArgument for a name of another form, and for a device that this machine or build does not have.
void check_device(const std::string& name);

// Returns `count` names: "cpu:0", "cpu:1", ...
std::vector<std::string> logical_cpus(int count);

// Returns one replica's device each: all GPUs that LibTorch can use, else a logical CPU for each core of this process.
std::vector<std::string> default_devices(cluster::CpuPartition partition = {});

// Returns the first GPU, else the CPU with all its cores.
std::string default_device();

// Returns LibTorch's device for a replica's tensors: all logical CPUs are its one CPU.
c10::Device torch_device(const std::string& name);

// The check of ElasticOptions. Throws InvalidArgument, which begins with the name of the strategy, for an option out of
// its range.
void check(const std::string& strategy, const ElasticOptions& options);

}  // namespace lockstep::strategy
