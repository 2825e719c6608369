// Compiled programs: for devices that are here, and ahead of time for some that are not.
#pragma once

#include "tpu/pjrt/client.h"

namespace lockstep::pjrt {

struct CompileOptions {
  int replicas = 1;                                         // that run the program together
  std::vector<int> devices = {};                            // [replica], by their ids; empty: the plugin chooses
  std::vector<std::pair<std::string, bool>> switches = {};  // of XLA's debug options (xla.proto), such as xla_cpu_...
};

// Memory of one device, in bytes, as the compiler reckons.
struct MemoryNeeds {
  std::int64_t arguments = 0, outputs = 0, aliased = 0, temporary = 0, code = 0;

  // Aliased outputs lie where arguments were.
  std::int64_t total() const { return arguments + outputs - aliased + temporary + code; }
};

// A program as a compiler made it.
class Program {
 public:
  Program(const Plugin& plugin, PJRT_Executable* executable);  // frees it

  std::size_t outputs() const;
  MemoryNeeds memory() const;
  double flops() const;  // of one run on one device; 0 where the plugin does not say

  // Returns text for Executable::load of a plugin of this version.
  std::string serialize() const;

 private:
  const Plugin& plugin() const { return executable_.get_deleter().plugin(); }

  std::unique_ptr<PJRT_Executable, Destroy<&PJRT_Api::PJRT_Executable_Destroy>> executable_;
};

// A program on this process's devices. Moves. Keeps its Client. Any thread may run it.
class Executable {
 public:
  // `stablehlo`: MLIR, as text or bytecode. Throws DeviceError with the compiler's text.
  static Executable compile(std::shared_ptr<const Client> client, std::string stablehlo, const CompileOptions& options);

  // Throws DeviceError where `serialized` is not a program of this plugin.
  static Executable load(std::shared_ptr<const Client> client, const std::string& serialized);

  Executable(Executable&&) = default;
  Executable& operator=(Executable&&) = delete;  // which would end the client before the program

  const Program& program() const { return program_; }
  const std::vector<Device>& devices() const { return devices_; }  // [replica of this process]

  struct Run {
    std::vector<std::vector<Buffer>> outputs;  // [replica][i], whose values come later
    std::vector<Event> ends;                   // [replica]
  };

  // Begins a run with arguments[replica][i]. Arguments that the program marks as aliased (tf.aliasing_output) may not
  // be used any more. `launch`: with several processes a number that is equal on all for one run, and differs between
  // runs. By it their plugins notice runs that were begun in another order; 0: none. Throws DeviceError, or
  // InvalidArgument where there are not as many lists as devices.
  Run run(const std::vector<std::vector<const Buffer*>>& arguments, int launch = 0) const;

 private:
  Executable(std::shared_ptr<const Client> client, PJRT_LoadedExecutable* executable);

  const std::shared_ptr<const Client>& client() const { return executable_.get_deleter().keeper; }

  std::unique_ptr<PJRT_LoadedExecutable,
                  Destroy<&PJRT_Api::PJRT_LoadedExecutable_Destroy, std::shared_ptr<const Client>>>
      executable_;
  Program program_;
  std::vector<Device> devices_;
  std::size_t outputs_;
};

// Chips that need not be here: "v5e:2x4".
class Topology {
 public:
  static Topology create(const Plugin& plugin, const std::string& name, const Options& options = {});

  int devices() const;
  std::string kind() const;  // of its devices

  Program compile(std::string stablehlo, const CompileOptions& options) const;

 private:
  Topology(const Plugin& plugin, PJRT_TopologyDescription* topology) : topology_(topology, {&plugin}) {}
  const Plugin& plugin() const { return topology_.get_deleter().plugin(); }
  std::vector<PJRT_DeviceDescription*> descriptions() const;

  std::unique_ptr<PJRT_TopologyDescription, Destroy<&PJRT_Api::PJRT_TopologyDescription_Destroy>> topology_;
};

}  // namespace lockstep::pjrt
