// The cores and the memory that this process may really use.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

// The ids of the cores in this process's affinity mask, in order.
std::vector<int> allowed_cpus();

// `cpus` sorted so that neighbours share the most hardware: by NUMA node, then package, then physical core. `system`:
// the sysfs folder that describes them; missing values count as 0.
std::vector<int> cpus_by_place(std::vector<int> cpus, const std::string& system = "/sys/devices/system");

// The number of cores that the control group's CPU quota (cpu.max) allows, at least 1; very many without a quota.
int quota_cpu_count();

// The smaller of the quota and the number of cores in the affinity mask.
int usable_cpu_count();

// The machine's memory, or the control group's bound on it (memory.max) where that is smaller.
std::size_t usable_memory_bytes();

// Sets how many training processes of this host share its memory; 1 until this is called. Any thread.
void share_memory_among(int processes);
int processes_that_share_memory();

// Keeps the calling thread, and the threads that it starts later, on `cpus`. Returns false where the system refuses.
bool pin_current_thread(std::span<const int> cpus);

}  // namespace lockstep
