// Checks that a checkpoint is of this model.
#include <map>
#include <set>
#include <sstream>

#include "base/log.h"
#include "base/text.h"
#include "collective/refused_by_all.h"
#include "lockstep/base/error.h"
#include "strategy/replicated_state.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostProblems = 10;  // that a message lists

std::string shape_text(const std::vector<std::int64_t>& shape) { return text("[", join(shape), "]"); }

std::map<std::string, std::vector<std::int64_t>> expected_shapes(const ReplicatedParameters& parameters) {
  std::map<std::string, std::vector<std::int64_t>> expected;
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    expected[parameters.slots()[i].name] = parameters.whole_sizes(i);
  }
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    expected[parameters.buffer_names()[i]] = parameters.buffer(0, i).sizes().vec();
  }
  return expected;
}

// Returns the lines of all workers, each once.
std::vector<std::string> lines_of_all(const Communicator& workers, const std::vector<std::string>& mine) {
  std::vector<std::string> all;
  std::set<std::string> seen;
  for (const auto& theirs : workers.all_gather(join(mine, "\n"))) {
    std::istringstream lines(theirs);
    for (std::string line; std::getline(lines, line);) {
      if (seen.insert(line).second) all.push_back(line);
    }
  }
  return all;
}

// Returns the names of all workers' variables: where a model is split, workers may have different ones.
std::set<std::string> names_of_all(const ReplicatedParameters& parameters,
                                   const std::map<std::string, std::vector<std::int64_t>>& mine) {
  std::vector<std::string> names;
  for (const auto& [name, shape] : mine) names.push_back(name);
  if (parameters.is_split()) names = lines_of_all(parameters.topology().all, names);
  return {names.begin(), names.end()};
}

std::vector<std::string> problems_of_all(const ReplicatedParameters& parameters, std::vector<std::string> mine) {
  return parameters.is_split() ? lines_of_all(parameters.topology().all, mine) : std::move(mine);
}

// Returns true for tensors of a full checkpoint that are no weights.
bool is_reserved(const std::string& name) {
  const auto folder = name.substr(0, name.find('/'));
  return folder != name && (folder == train::ModelState::kOptimizer || folder == train::ModelState::kCallback ||
                            folder == train::ModelState::kReplica);
}

std::vector<std::string> shortened(std::vector<std::string> lines) {
  if (lines.size() <= kMostProblems) return lines;
  const auto more = lines.size() - kMostProblems;
  lines.resize(kMostProblems);
  lines.push_back(text("and ", more, " more"));
  return lines;
}

// The differences between the archive and this process's part of the model.
struct Differences {
  std::vector<std::string> refused, passed_over;  // for messages
  std::set<std::string> left;                     // variables that stay as they are
};

Differences differences(const Archive& archive, const ReplicatedParameters& parameters,
                        const std::map<std::string, std::vector<std::int64_t>>& expected,
                        const LoadWeightsOptions& options) {
  Differences found;
  const auto add = [&](bool allowed, const std::string& line) {
    (allowed ? found.passed_over : found.refused).push_back(line);
  };
  for (const auto& [name, shape] : expected) {
    const auto stored = archive.tensors.find(name);
    const bool is_missing = stored == archive.tensors.end();
    if (is_missing) {
      add(options.by_name, text(name, " is missing in the checkpoint"));
    } else if (stored->second.shape != shape) {
      add(options.skip_mismatch, text(name, " is ", shape_text(stored->second.shape), " in the checkpoint and ",
                                      shape_text(shape), " in the model"));
    }
    if (is_missing || stored->second.shape != shape) found.left.insert(name);
  }
  const auto known = names_of_all(parameters, expected);
  for (const auto& [name, tensor] : archive.tensors) {
    if (parameters.is_whole() && !known.contains(name) && !is_reserved(name))
      add(options.by_name, text(name, " is not in the model"));
  }
  return found;
}

}  // namespace

std::set<std::string> train::check_weights(const Archive& archive, const ReplicatedParameters& parameters,
                                           const LoadWeightsOptions& options) {
  const auto expected = expected_shapes(parameters);
  auto found = differences(archive, parameters, expected, options);
  const auto refused = problems_of_all(parameters, std::move(found.refused));
  if (!refused.empty())
    throw collective::RefusedByAll(parameters.topology().all,
                                   text("the checkpoint is of another model: ", join(shortened(refused), "; ")));
  if (!options.by_name && !options.skip_mismatch) return {};
  const auto passed_over = shortened(problems_of_all(parameters, std::move(found.passed_over)));
  std::vector<std::string> loaded;
  for (const auto& [name, shape] : expected) {
    if (!found.left.contains(name)) loaded.push_back(name);
  }
  loaded = problems_of_all(parameters, std::move(loaded));
  if (loaded.empty())
    throw collective::RefusedByAll(
        parameters.topology().all,
        text("load_weights: no variable of the model would be loaded: ", join(passed_over, "; ")));
  if (!passed_over.empty() && parameters.topology().all.rank() == 0) {
    log_warning(text("load_weights: the model takes ", loaded.size(),
                     " variables; not loaded, and left as they are: ", join(passed_over, "; ")));
  }
  return found.left;
}

std::function<void()> train::change_weights(const Archive& archive, const LoadWeightsOptions& options,
                                            const std::shared_ptr<ReplicatedParameters>& parameters,
                                            const std::function<void()>& fetch) {
  const auto left = check_weights(archive, *parameters, options);
  if (!left.empty() && fetch) fetch();
  return strategy::values_of(parameters, strategy::Values::all, strategy::Whose::of_all_workers, left)
      .load(archive, "");
}

}  // namespace lockstep
