#include "tpu/devices.h"

#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"

namespace lockstep::tpu {
namespace {

constexpr double kMib = 1 << 20, kGib = 1 << 30;

// Bytes of a device's memory, by Google's documentation of its chips, of which some have two cores with half of it
// each; 0 where the kind is not known.
double memory_of(const std::string& kind) {
  static const std::map<std::string, double> gib{{"TPU v2", 8},      {"TPU v3", 16},  {"TPU v4", 32},
                                                 {"TPU v5", 95},     {"TPU v5p", 95}, {"TPU v5 lite", 16},
                                                 {"TPU v6 lite", 32}};
  const auto found = gib.find(kind);
  return found == gib.end() ? 0 : found->second * kGib;
}

// A v4's two cores are one device on Google's machines.
pjrt::Options as_on_machines(const std::string& chips) {
  if (chips.starts_with("v4:")) return {{"chip_config_name", "megacore"}};
  return {};
}

// For `lockstep compile-for`, which reads "fits" or "fails" first (cli/compile_for.cc), or for who set
// LOCKSTEP_COMPILE_FOR alone.
void report(bool fits, const std::string& line) {
  const char* const path = std::getenv("LOCKSTEP_COMPILE_REPORT");
  if (path == nullptr) {
    std::cout << line << std::endl;
    return;
  }
  std::ofstream(path, std::ios::app) << (fits ? "fits " : "fails ") << line << "\n";
}

class NotRun final : public ops::CompiledProgram {
 public:
  NotRun(std::string name, std::string chips) : name_(std::move(name)), chips_(std::move(chips)) {}
  std::uint64_t hash() const override { return 0; }
  std::unique_ptr<ops::LaunchedProgram> launch(Launch) override { refuse(); }
  std::unique_ptr<ops::ProgramInputs> copy(const std::vector<std::vector<at::Tensor>>&) override { refuse(); }

 private:
  [[noreturn]] void refuse() const {
    throw DeviceError(
        text(name_, " was compiled for ", chips_,
             ", as `lockstep compile-for` asked; the program ends here, since those chips are not in this "
             "machine"));
  }

  const std::string name_, chips_;
};

class CompileFor final : public ops::ProgramDevices {
 public:
  CompileFor(std::string chips, const ops::ProgramDevicesOptions& options)
      : chips_(std::move(chips)),
        topology_(pjrt::Topology::create(pjrt::Plugin::load(pjrt::plugin_path(options.plugin)), chips_,
                                         as_on_machines(chips_))),
        replicas_(options.replicas == 0 ? topology_.devices() : options.replicas) {
    const Trace before_the_first_backward;
  }

  int replicas() const override { return replicas_; }
  int all_replicas() const override { return replicas_; }
  std::string kind() const override { return topology_.kind(); }
  const ops::ProgramCounts& counts() const override { return counts_; }
  std::string describe() const override { return ""; }
  void fail_waiters(const std::string&) const override {}  // there are no other processes
  std::unique_ptr<ops::DeviceVariables> variables(std::vector<Tensors> hosts) override {
    return variables_.add({}, std::move(hosts));
  }

  std::unique_ptr<ops::CompiledProgram> compile(const Step& step) override {
    std::string program;
    {
      TracedStep trace(replicas_, /*for_cpu=*/false, [this](const at::Tensor& host) { return variables_.find(host); });
      ++counts_.traced;
      program = trace.finish(step.function(trace.add_inputs(step.inputs)), step.steps);
    }
    log_info(text("compiling ", step.name, " for ", replicas_, " replicas on ", chips_, ", which may take minutes"));
    try {
      describe(step.name, topology_.compile(program, {.replicas = replicas_}));
    } catch (const DeviceError& error) {
      report(false, text(step.name, " for ", replicas_, " replicas on ", chips_,
                         ": does not fit, or cannot be compiled: ", error.what()));
      throw;
    }
    ++counts_.compiled;
    return std::make_unique<NotRun>(step.name, chips_);
  }

 private:
  void describe(const std::string& name, const pjrt::Program& program) {
    const auto needs = program.memory();
    counts_.bytes = needs.total();
    std::ostringstream line;
    line << std::fixed << std::setprecision(1) << name << " for " << replicas_ << " replicas on " << chips_ << " ("
         << kind() << "): " << static_cast<double>(needs.total()) / kMib << " MiB a device (arguments "
         << static_cast<double>(needs.arguments) / kMib << ", results " << static_cast<double>(needs.outputs) / kMib
         << " of which " << static_cast<double>(needs.aliased) / kMib << " lie where arguments were, temporary "
         << static_cast<double>(needs.temporary) / kMib << ", code " << static_cast<double>(needs.code) / kMib << "), "
         << program.flops() / 1e9 << " GFLOP a device; ";
    const double memory = memory_of(kind());
    const bool fits = memory == 0 || static_cast<double>(needs.total()) <= memory;
    if (memory == 0)
      line << "the memory of these devices is not known";
    else
      line << (fits ? "fits" : "does not fit") << " into " << memory / kGib << " GiB";
    report(fits, line.str());
  }

  const std::string chips_;
  const pjrt::Topology topology_;
  const int replicas_;
  ops::ProgramCounts counts_;
  VariableTable variables_;
};

}  // namespace

std::shared_ptr<ops::ProgramDevices> devices_to_compile_for(const std::string& chips,
                                                            const ops::ProgramDevicesOptions& options) {
  return std::make_shared<CompileFor>(chips, options);
}

}  // namespace lockstep::tpu
