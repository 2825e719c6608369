// For tests: whole files.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace lockstep::checkpoint {

inline void put(const std::filesystem::path& file, const std::string& contents) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << contents;
}

inline std::string contents_of(const std::filesystem::path& file) {
  std::ostringstream contents;
  contents << std::ifstream(file, std::ios::binary).rdbuf();
  return contents.str();
}

}  // namespace lockstep::checkpoint
