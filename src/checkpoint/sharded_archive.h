// Checkpoints in several files, which several processes write: a main file, and files with rows of its larger tensors.
// The main file lists the others, and is written last.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/rows_folders.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// Under which name a file has the rows [begin, end) of a tensor: "dense/kernel[0:250]".
std::string name_of_rows(const std::string& tensor, std::int64_t begin, std::int64_t end);

// The file of process `index` of `count`: "ps-0-of-2.safetensors".
std::string name_of_part(const std::string& process, int index, int count);

// Lists a file with rows in the main file: its name in rows_folder, and the names of its tensors.
void list_rows(Archive& main, const std::string& file, const std::vector<std::string>& names);

// Rows [begin, end) of a tensor, as the main file lists them.
struct ListedRows {
  std::int64_t begin = 0, end = 0;
  std::filesystem::path file;
  std::string name;  // in the file
};

// The rows of each tensor, ascending. Throws DataError where the main file of `path`, which has these entries, lists
// what cannot be.
std::map<std::string, std::vector<ListedRows>> listed_rows(const std::string& path,
                                                           const std::map<std::string, std::string>& entries);

// The file with a server's rows of tables, beside the file with its shards.
std::filesystem::path tables_file(std::filesystem::path shards_file);

// The contents of a checkpoint's files, one or several.
class ShardedArchive {
 public:
  // Reads the main file. Throws as read_archive.
  explicit ShardedArchive(const std::string& path);

  const std::string& path() const { return path_; }
  const Archive& main() const { return main_; }

  bool has(const std::string& tensor) const { return main_.tensors.contains(tensor) || parts_.contains(tensor); }

  // A tensor's rows [begin, end), from the files that have them; a scalar has one row. Throws as read_archive, and
  // InvalidArgument where rows are missing.
  StoredTensor rows(const std::string& tensor, std::int64_t begin, std::int64_t end);

  // Returns the checkpoint as one archive.
  Archive whole();

 private:
  const StoredTensor& read(const ListedRows& part);

  const std::string path_;
  Archive main_;
  const std::map<std::string, std::vector<ListedRows>> parts_;
  std::map<std::string, Archive> files_;  // that were read
};

}  // namespace lockstep::checkpoint
