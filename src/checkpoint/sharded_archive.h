// Checkpoints in several files, which several processes write: a main file, and files with rows of its larger tensors.
// The main file lists the others, and is written last.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// Under which name a file has the rows [begin, end) of a tensor: "dense/kernel[0:250]".
std::string name_of_rows(const std::string& tensor, std::int64_t begin, std::int64_t end);

// The file of process `index` of `count`: "ps-0-of-2.safetensors".
std::string name_of_part(const std::string& process, int index, int count);

// Where the files with rows lie that belong to the main file at `path`: each save into a folder of its own in it.
std::filesystem::path rows_folder(const std::string& path);

// Lists a file with rows in the main file: its name in rows_folder, and the names of its tensors.
void list_rows(Archive& main, const std::string& file, const std::vector<std::string>& names);

// Removes what rows_folder has, but for the folder `kept` in it. Warns where it cannot, since nothing is lost by that.
void remove_rows_but(const std::string& path, const std::string& kept);

// The main file and the files with rows; does nothing where there are none. The second throws IoError.
void remove_checkpoint(const std::string& path, std::error_code& failed);
void remove_checkpoint(const std::string& path);

// What lies in the files of a checkpoint, one or several.
class ShardedArchive {
 public:
  // Reads the main file. Throws as read_archive.
  explicit ShardedArchive(const std::string& path);

  const std::string& path() const { return path_; }
  const Archive& main() const { return main_; }

  // A tensor's rows [begin, end), from the files that have them; a scalar has one row. Throws as read_archive, and
  // InvalidArgument where rows are missing.
  StoredTensor rows(const std::string& tensor, std::int64_t begin, std::int64_t end);

  // As if all were in one file.
  Archive whole();

 private:
  struct Part {
    std::int64_t begin = 0, end = 0;
    std::string file, name;
  };
  const StoredTensor& read(const Part& part);

  const std::string path_;
  Archive main_;
  std::map<std::string, std::vector<Part>> parts_;  // [tensor], ascending
  std::map<std::string, Archive> files_;            // that were read
};

}  // namespace lockstep::checkpoint
