#include "cli/commands.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <regex>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::cli {
namespace {

std::string new_report_file() {
  auto path = (std::filesystem::temp_directory_path() / "lockstep_compile_XXXXXX").string();
  const int file = mkstemp(path.data());
  if (file < 0) throw IoError(text(path, ": ", std::strerror(errno)));
  close(file);
  return path;
}

int status_of(std::vector<std::string> command) {
  pid_t process = 0;
  const int error = posix_spawnp(&process, command[0].c_str(), nullptr, nullptr, pointers_to(command).data(), environ);
  if (error != 0) throw Error(text("cannot start ", command[0], ": ", std::strerror(error)));
  int status = 0;
  while (waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// "v5e:2x4": a generation, and the chips of each dimension. Only libtpu knows which topologies exist.
bool is_topology(const std::string& chips) {
  static const std::regex form("v[0-9]+[a-z]*:[1-9][0-9]*(x[1-9][0-9]*)*");
  return std::regex_match(chips, form);
}

}  // namespace

int compile_for(const std::string& chips, const std::vector<std::string>& command, std::ostream& out) {
  if (command.empty()) throw InvalidArgument("compile-for: name a program: lockstep compile-for v5e:2x4 ./train");
  if (!is_topology(chips)) {  // found now, and not by libtpu when the program has trained
    throw InvalidArgument(text("compile-for: the chips are \"", chips, "\"; they must be named as libtpu does: a ",
                               "generation, and the chips of each dimension, as v5e:2x4 or v4:2x2x1"));
  }
  const auto report = new_report_file();
  const std::shared_ptr<void> removed_at_end(nullptr, [&](void*) { std::filesystem::remove(report); });
  setenv("LOCKSTEP_COMPILE_FOR", chips.c_str(), 1);
  setenv("LOCKSTEP_COMPILE_REPORT", report.c_str(), 1);
  // Without these libtpu looks for chips, and for the machines of a Cloud TPU.
  const char* const without_chips[][2] = {{"TPU_SKIP_MDS_QUERY", "1"},
                                          {"TPU_WORKER_HOSTNAMES", "localhost"},
                                          {"TPU_WORKER_ID", "0"},
                                          {"TPU_ACCELERATOR_TYPE", "v5litepod-4"}};
  for (const auto& [name, value] : without_chips) setenv(name, value, 0);
  const int status = status_of(command);
  std::ifstream lines(report);
  bool has_some = false, fits = true;
  for (std::string verdict, line; lines >> verdict && std::getline(lines >> std::ws, line);) {
    out << line << "\n";
    has_some = true;
    if (verdict != "fits") fits = false;
  }
  if (has_some) return fits ? 0 : 1;
  if (status == 0)
    out << "no step was compiled: does the program train by a TPUStrategy?\n";
  else
    out << "the program ended with status " << status << " before it compiled a step\n";
  return status == 0 ? 1 : status;
}

}  // namespace lockstep::cli
