// `lockstep run` as a test calls it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/processes/processes.h"

namespace lockstep {

inline constexpr double kSoon = 20;

// `lockstep run <options> bash -c <script>`, both streams together.
inline Process run(const std::vector<std::string>& options, const std::string& script) {
  std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run"};
  command.insert(command.end(), options.begin(), options.end());
  for (const auto* word : {"bash", "-c"}) command.push_back(word);
  command.push_back(script);
  return Process(command);
}

// The exit status, of one that was not ended by a signal.
inline int exit_status(const Process& process) {
  return WIFEXITED(process.status()) ? WEXITSTATUS(process.status()) : -1;
}

inline void expect_has(const std::string& output, const std::string& part) {
  EXPECT_NE(output.find(part), std::string::npos) << output;
}

}  // namespace lockstep
