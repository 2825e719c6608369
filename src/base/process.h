// This process: the cores and the memory that it may really use, the stacks of its threads, and libraries of ours that
// it loads when they are first needed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

std::string name_of_this_host();

// The texts as exec takes them, with a null pointer after the last. Valid while the texts are.
std::vector<char*> pointers_to(std::vector<std::string>& texts);

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

// The stacks of all threads of this process. Returns a line for each thread, with its number and name, and one for each
// of its frames. A frame is the function where its library exports it, and the library with an offset, as addr2line -e
// takes it. Threads that do not answer within a second have no frames. A signal asks them (SIGRTMIN + 7): system calls
// restart, but sleeps may end early. Any thread.
std::string stacks_of_all_threads();

// Libraries of ours that are loaded when they are first needed.

// The library liblockstep_NAME.so, which lies beside this one.
struct Plugin {
  const char* name;
  const char* needed_for;  // for messages: "parameter servers"
  const char* option;      // of CMake, for a build to have the library
};

// Returns the library's function of that name. If there is none, returns null, and says why in `reason`.
void* find_in_plugin(const Plugin& plugin, const char* function, std::string& reason);

// Returns the library's function of that name. Throws Failure if there is none.
template <class Failure, class Function>
Function* function_of_plugin(const Plugin& plugin, const char* function) {
  std::string reason;
  if (void* const found = find_in_plugin(plugin, function, reason)) return reinterpret_cast<Function*>(found);
  throw Failure(reason);
}

// Libraries of others that are loaded when they are first needed.

// The first library among `names` that the process has already, else the first that can be loaded. It is never
// unloaded.
class OpenedLibrary {
 public:
  // `name`: for messages, "NCCL". `missing` begins the message of the InvalidArgument that is thrown if there is none.
  // `options`: what dlopen gets beside RTLD_NOW, such as RTLD_GLOBAL.
  OpenedLibrary(std::string name, std::span<const char* const> names, const std::string& missing, int options = 0);

  // Throws InvalidArgument where the library has no such function.
  template <class Function>
  void find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(address_of(name));
  }

  // Returns null where the library has nothing of that name.
  void* find_or_null(const char* name) const;

 private:
  void* address_of(const char* name) const;

  std::string name_;
  void* handle_ = nullptr;
};

}  // namespace lockstep
