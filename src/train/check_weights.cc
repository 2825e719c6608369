// Whether a checkpoint is of this model.
#include <map>
#include <set>
#include <sstream>

#include "base/text.h"
#include "lockstep/base/error.h"
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

// The lines of all workers, each once.
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

// Of a model that is split, workers may have other variables.
std::set<std::string> names_of_all(const ReplicatedParameters& parameters,
                                   const std::map<std::string, std::vector<std::int64_t>>& mine) {
  std::vector<std::string> names;
  for (const auto& [name, shape] : mine) names.push_back(name);
  if (parameters.is_split()) names = lines_of_all(parameters.all_workers(), names);
  return {names.begin(), names.end()};
}

std::vector<std::string> problems_of_all(const ReplicatedParameters& parameters, std::vector<std::string> mine) {
  return parameters.is_split() ? lines_of_all(parameters.all_workers(), mine) : std::move(mine);
}

// Tensors of a full checkpoint that are no weights.
bool is_reserved(const std::string& name) {
  const auto folder = name.substr(0, name.find('/'));
  return folder != name &&
         (folder == ModelImpl::kOptimizer || folder == ModelImpl::kCallback || folder == ModelImpl::kReplica);
}

}  // namespace

void train::check_weights(const Archive& archive, const ReplicatedParameters& parameters) {
  const auto expected = expected_shapes(parameters);
  std::vector<std::string> problems;
  for (const auto& [name, shape] : expected) {
    const auto found = archive.tensors.find(name);
    if (found == archive.tensors.end()) {
      problems.push_back(text(name, " is missing in the checkpoint"));
    } else if (found->second.shape != shape) {
      problems.push_back(text(name, " is ", shape_text(found->second.shape), " in the checkpoint and ",
                              shape_text(shape), " in the model"));
    }
  }
  const auto known = names_of_all(parameters, expected);
  for (const auto& [name, tensor] : archive.tensors) {
    if (parameters.is_whole() && !known.contains(name) && !is_reserved(name))
      problems.push_back(text(name, " is not in the model"));
  }
  problems = problems_of_all(parameters, std::move(problems));
  if (problems.empty()) return;
  if (problems.size() > kMostProblems) {
    const auto more = problems.size() - kMostProblems;
    problems.resize(kMostProblems);
    problems.push_back(text("and ", more, " more"));
  }
  throw InvalidArgument(text("the checkpoint is of another model: ", join(problems, "; ")));
}

}  // namespace lockstep
