// Programs of fit that are drawn: each computes what a plain loop in one process does, and saves it, or is refused on
// all ranks.
#include <algorithm>
#include <filesystem>

#include "base/fresh_folder_testing.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/train/mixed_precision.h"
#include "tests/drawn_fit_training.h"

namespace lockstep {
namespace {

// --- comparisons

// Compares as `differences`, and in float32 within thirty times the largest error of `plain`: sums are of another order
// there.
std::string compare(const FitProgram& program, const Values& found, const Values& exact, const Values& plain) {
  if (program.precision == DrawnPrecision::float64) return differences(found, exact);
  if (program.precision != DrawnPrecision::float32) {
    auto rounded = plain;
    for (auto& [name, value] : rounded) {  // a number alone may be right by chance
      const auto& right = exact.at(name);
      if (value.dim() == 0) value = right + 0.03 * (1 + right.abs());
      if (name == "predict")
        value = right + (value - right).abs() + 0x1p-8 * right.abs();  // an output is rounded itself
    }
    return differences(found, exact, {rounded}, at::kBFloat16);
  }
  double error = 1e-6;
  for (const auto& [name, value] : plain) error = std::max(error, (value - exact.at(name)).abs().max().item<double>());
  auto closer = found;  // by what is allowed
  for (auto& [name, value] : closer) {
    if (exact.contains(name)) value = exact.at(name) + (value - exact.at(name)) * (1e-9 / (30 * error));
  }
  return differences(closer, exact);
}

std::string compare_processes(const FitProgram& program, const std::vector<Process>& processes, int phase,
                              const Expected& exact, const Expected& plain) {
  for (const auto& process : processes) {
    if (process.snapshots.empty()) continue;  // a worker's of servers
    std::size_t count = 0;
    for (const auto& [key, right] : exact.snapshots) {
      if (key[0] != phase) continue;
      ++count;
      const auto where = text(process.name, ", phase ", key[0], ", fit ", key[1], ", epoch ", key[2], ": ");
      const auto found = process.snapshots.find(key);
      if (found == process.snapshots.end()) return where + "was not reached";
      const auto& rounded = plain.snapshots.at(key);
      const auto weights = compare(program, found->second.weights, right.weights, rounded.weights);
      if (!weights.empty()) return where + weights;
      for (const auto& [name, value] : found->second.results) {
        if (!right.results.contains(name)) return where + name + " is not expected";
        const Values one{{name, right.results.at(name)}};
        const auto result = compare(program, {{name, value}}, one, {{name, rounded.results.at(name)}});
        if (!result.empty()) return where + result;
      }
    }
    if (count != process.snapshots.size()) return process.name + " trained longer than the plain loop";
  }
  return "";
}

std::string compare_files(const FitProgram& program, const std::string& folder, const Expected& exact,
                          const Expected& plain) {
  for (const auto& [name, right] : exact.files) {
    const auto file = checkpoint_file(folder + "/" + name);
    if (!std::filesystem::exists(file)) return name + " was not saved";
    const bool in_parts = checkpoint::file_exists(checkpoint::rows_folder(file));
    auto found = values_in(in_parts ? checkpoint::ShardedArchive(file).whole() : read_archive(file));
    std::erase_if(found, [&](const auto& entry) { return !right.contains(entry.first); });
    const auto said = compare(program, found, right, plain.files.at(name));
    if (!said.empty()) return name + ": " + said;
  }
  return "";
}

// Empty, or why the processes did not all refuse the program.
std::string compare_refusals(const std::vector<Process>& processes) {
  for (const auto& process : processes) {
    if (!process.threw) return process.name + " threw nothing, and another process: " + processes.front().what;
    if (!process.is_ours) return process.name + " threw no Error: " + process.what;
  }
  return "";
}

FitData make_data(const FitProgram& program) {
  const auto& data = program.data;
  auto generator = at::detail::createCPUGenerator(data.seed);
  const auto make = [&](std::int64_t examples) {
    const auto integers = [&](at::IntArrayRef shape) {
      return at::randint(DrawnModel::kClasses, shape, generator, at::kLong);
    };
    auto shape = program.model.input_shape();
    shape.insert(shape.begin(), examples);
    const bool ids = program.model.ids();
    // Numbers that float32 has too.
    const auto x = ids ? integers(shape) : at::randn(shape, generator, at::kFloat).to(at::kDouble);
    return DrawnData{x,
                     program.model.of_tokens() ? integers({examples, DrawnModel::kPositions}) : integers({examples})};
  };
  const auto weights = [&](std::int64_t examples) {
    if (!data.weights) return Tensor();
    const auto some = at::rand({examples}, generator, at::kFloat).to(at::kDouble);
    return at::where(some < 0.2, at::zeros_like(some), some * 2);
  };
  const auto validation = std::max<std::int64_t>(data.validation, 3);
  FitData made{make(data.examples), make(validation), weights(data.examples), weights(validation), {}};
  if (data.class_weight) made.class_weight = {{0, 0.5}, {2, 3.0}, {5, 0}};
  return made;
}

void save_initial(const FitProgram& program, std::uint64_t seed, const std::string& path) {
  if (program.model.net) return;
  const OneDeviceStrategy strategy("cpu:0", 1);
  const auto scope = strategy.scope();
  set_random_seed(seed);
  auto model = program.model.make(program.dtype());
  model.build(program.model.input_shape(), program.model.ids() ? at::kLong : program.dtype());
  model.save_weights(path);
}

DrawnResult run_program(std::uint64_t seed) {
  const auto program = draw_program(seed);
  DrawnResult result{.program = program.text()};
  const char* const programs = std::getenv("LOCKSTEP_PROGRAMS");  // of tests that may run at the same time
  const auto folder =
      fresh_folder(text("drawn_fits", programs == nullptr ? "" : programs), std::to_string(seed)).string();
  const auto data = make_data(program);
  save_initial(program, seed, folder + "/initial");
  Expected exact, plain;
  bool trains = true;
  try {
    exact = PlainFits(program, data, folder + "/initial", false).run();
    plain = program.precision == DrawnPrecision::float64 ? exact
                                                         : PlainFits(program, data, folder + "/initial", true).run();
  } catch (const NothingToTrain&) {
    trains = false;
  }
  set_global_policy(program.precision == DrawnPrecision::mixed_bfloat16 ? "mixed_bfloat16" : "float32");
  for (int phase = 0; phase < static_cast<int>(program.phases.size()) && !result.refused; ++phase) {
    const auto processes = run_phase(program, data, phase, folder);
    const auto failed = std::find_if(processes.begin(), processes.end(), [](const auto& one) { return one.threw; });
    if (failed != processes.end()) {
      result.refused = failed->what;
      result.wrong = compare_refusals(processes);
    } else if (trains) {
      result.wrong = compare_processes(program, processes, phase, exact, plain);
    }
    if (!result.wrong.empty()) break;
  }
  set_global_policy("float32");
  if (!result.wrong.empty() || result.refused) return result;
  result.wrong = trains ? compare_files(program, folder, exact, plain) : "nothing is trained, and it was not refused";
  if (result.wrong.empty()) std::filesystem::remove_all(folder);
  return result;
}

// These programs failed once.
const std::vector<KeptSeed> kKept = {
    {3},    // with servers, workers kept running statistics in place of those that a callback had loaded
    {282},  // with servers that wait for all workers, a loss that is a sum had the gradient of the first part alone
};

TEST(DrawnFits, ComputeAndSaveWhatAPlainLoopDoes) { check_drawn_programs(kKept, 15, 0.2, run_program); }

}  // namespace
}  // namespace lockstep
