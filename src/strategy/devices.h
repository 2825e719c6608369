// Devices by name: "cpu:0", "cpu:1", ... are logical CPUs, "cuda:0", ... GPUs.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace lockstep {

// The cores that this process might use when it first asked: later its threads keep to some of them.
const std::vector<int>& first_cpus();

// Of this process, among those that train on one host: each has an equal part of its GPUs, and of its cores unless
// whoever started the processes gave each its own.
struct HostShare {
  int rank = 0;
  int size = 1;
  bool own_cores = false;

  int usable_cpu_count() const;  // at least 1
  std::vector<int> cpus() const;
};

// Throws InvalidArgument for a name of another form, and for a device that this machine or build does not have.
void check_device(const std::string& name);

// "cpu:0", ..., one for each of `count`.
std::vector<std::string> logical_cpus(int count);

// One replica a GPU that LibTorch can use, else one a core that this process may use.
std::vector<std::string> default_devices(HostShare share = {});

// The first of these, or the CPU with all its cores.
std::string default_device();

// Where LibTorch's tensors of a replica lie: all logical CPUs are one CPU to it.
c10::Device torch_device(const std::string& name);

}  // namespace lockstep
