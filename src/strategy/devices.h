// Devices by name: "cpu:0", "cpu:1", ... are logical CPUs, "cuda:0", ... GPUs.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// Throws InvalidArgument for a name of another form, and for a device that this machine or build does not have.
void check_device(const std::string& name);

// "cpu:0", ..., one for each of `count`.
std::vector<std::string> logical_cpus(int count);

// One replica a core that this process may use.
std::vector<std::string> default_devices();

}  // namespace lockstep
