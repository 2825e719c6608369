#include "cli/commands.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <iomanip>
#include <regex>
#include <sstream>
#include <vector>

#include "base/process.h"
#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kLongestEntry = 60;

std::string shortened(const std::string& entry) {
  return entry.size() <= kLongestEntry ? entry : entry.substr(0, kLongestEntry) + "...";
}

// Entries with numbers have them in hexadecimal digits, so that no bit is lost: here in the shortest decimal ones.
std::string readable(const std::string& entry) {
  static const std::regex kHexadecimal("-?0x[0-9a-f]+(\\.[0-9a-f]*)?p[+-]?[0-9]+|-?(inf|nan)");
  std::vector<std::string> words;
  std::istringstream all(entry);
  for (std::string word; all >> word;) {
    if (!std::regex_match(word, kHexadecimal)) return entry;
    std::array<char, 32> digits{};
    const auto printed = std::to_chars(digits.begin(), digits.end(), std::strtod(word.c_str(), nullptr));
    words.emplace_back(digits.begin(), printed.ptr);
  }
  return words.empty() ? entry : join(words, " ");
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
  const auto archive = checkpoint::survey(file);
  out << checkpoint_file(file) << ": whole";
  if (!archive.files.empty()) out << ", with " << archive.files.size() << " file(s) of rows";
  out << "\n";
  std::size_t longest = 0;
  for (const auto& [name, tensor] : archive.tensors) longest = std::max(longest, name.size());
  for (const auto& [name, entry] : archive.entries) longest = std::max(longest, name.size());
  const auto column = static_cast<int>(longest) + 2;
  for (const auto& [name, tensor] : archive.tensors) {
    out << std::left << std::setw(column) << name << std::setw(10) << name_of(tensor.dtype) << "[" << join(tensor.shape)
        << "]\n";
  }
  for (const auto& [name, entry] : archive.entries)
    out << std::left << std::setw(column) << name << shortened(readable(entry)) << "\n";
}

}  // namespace lockstep::cli
