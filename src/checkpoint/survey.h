// A survey of what a checkpoint holds, in one file or several, without its values in memory.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>

#include "checkpoint/safetensors_header.h"

namespace lockstep::checkpoint {

struct Survey {
  std::map<std::string, std::string> entries;  // of the main file
  std::map<std::string, TensorInfo> tensors;   // those in several files as if they were in one
  std::set<std::filesystem::path> files;       // with rows, beside the main file
};

// Reads all files of the checkpoint once, and compares them with their checksums. Throws as read_archive, and
// DataError, naming the file, where one with rows is missing, damaged, or has other rows than the main file lists.
Survey survey(const std::string& path);

}  // namespace lockstep::checkpoint
