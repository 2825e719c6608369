// For tests: an empty folder of their own in the build tree, made anew at each call.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep {

inline std::filesystem::path fresh_folder(const std::string& test, const std::string& name) {
  const auto folder = std::filesystem::path(LOCKSTEP_BINARY_DIR) / "test_folders" / test / name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

}  // namespace lockstep
