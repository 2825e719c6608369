// Trainings through `lockstep run` that go on when some workers are lost, and what they print.
#pragma once

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"
#include "tests/processes/processes.h"

namespace lockstep {

// `lockstep run` of the program with these variables of the environment; without workers the program alone. Its
// standard error goes to its standard output.
inline Process elastic_job(const std::string& program, const std::vector<std::string>& variables, int workers,
                           int fewest, int restarts = 0) {
  std::vector<std::string> command{"/usr/bin/env"};
  command.insert(command.end(), variables.begin(), variables.end());
  for (const auto& word :
       {std::string("/bin/sh"), std::string("-c"), std::string("exec \"$@\" 2>&1"), std::string("sh")})
    command.push_back(word);
  if (workers > 0) {
    for (const auto& word : {std::string(LOCKSTEP_CLI), std::string("run"), std::string("-n"), std::to_string(workers),
                             std::string("--min-n"), std::to_string(fewest), std::string("--restarts"),
                             std::to_string(restarts), std::string("--grace"), std::string("1")})
      command.push_back(word);
  }
  command.push_back(program);
  return Process(command);
}

// The numbers of the lines that have `word`, in their order: of each worker that has ended well.
inline std::vector<std::vector<double>> numbers_after(const std::string& output, const std::string& word) {
  std::vector<std::vector<double>> found;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find(word);
    if (at == std::string::npos) continue;
    std::istringstream numbers(line.substr(at + word.size()));
    auto& values = found.emplace_back();
    for (double value = 0; numbers >> value;) values.push_back(value);
  }
  return found;
}

inline double difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size() || a.empty()) return INFINITY;
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

// The process of worker `rank`, which it has printed.
inline int process_of(Process& job, int rank, const char* member = "worker") {
  const auto line = text("[", rank, "] ", member, " at ");
  const auto& printed = job.wait_for_line(line, 30);
  return std::stoi(printed.substr(printed.find(line) + line.size()));
}

}  // namespace lockstep
