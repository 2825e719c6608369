// Which cores this process may really use.
#pragma once

#include <span>
#include <vector>

namespace lockstep {

// The ids of the cores in this process's affinity mask, in order.
std::vector<int> allowed_cpus();

// How many of them the control group's CPU quota (cpu.max) pays for: at least 1, at most allowed_cpus().size().
int usable_cpu_count();

// Keeps the calling thread, and the threads that it starts later, on `cpus`. Returns false where the system refuses.
bool pin_current_thread(std::span<const int> cpus);

}  // namespace lockstep
