#include "cli/commands.h"

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>

#include "base/resources.h"
#include "base/text.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kLongestEntry = 60;

std::string shortened(const std::string& entry) {
  return entry.size() <= kLongestEntry ? entry : entry.substr(0, kLongestEntry) + "...";
}

}  // namespace

void print_devices(std::ostream& out) {
  const auto cpus = allowed_cpus();
  out << "cores this process may run on: " << cpus.size() << " (" << join(cpus) << ")\n"
      << "cores that it can use at once: " << usable_cpu_count() << "\n"
      << "MirroredStrategy() makes " << usable_cpu_count() << " replica(s), one a core\n";
}

void print_checkpoint(const std::string& path, std::ostream& out) {
  std::string file = path;
  if (std::filesystem::is_directory(path)) {
    file = latest_checkpoint(path);
    if (file.empty())
      throw InvalidArgument(text(path, " has no checkpoint; its file `checkpoint` would name the latest"));
  }
  const auto archive = read_archive(file);
  out << checkpoint_file(file) << ": whole\n";
  std::size_t longest = 0;
  for (const auto& [name, tensor] : archive.tensors) longest = std::max(longest, name.size());
  for (const auto& [name, entry] : archive.entries) longest = std::max(longest, name.size());
  const auto column = static_cast<int>(longest) + 2;
  for (const auto& [name, tensor] : archive.tensors) {
    out << std::left << std::setw(column) << name << std::setw(10) << name_of(tensor.dtype) << "[" << join(tensor.shape)
        << "]\n";
  }
  for (const auto& [name, entry] : archive.entries)
    out << std::left << std::setw(column) << name << shortened(entry) << "\n";
}

}  // namespace lockstep::cli
