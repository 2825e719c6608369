// Checkpoints in several files, which several processes write: a main file, and files with rows of its larger tensors.
// The main file lists the others, and is written last.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint/folder_lock.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// The folders with the rows of a checkpoint, which several processes write. Those of PATH.safetensors lie in PATH.rows,
// where each save has a folder of its own. Any thread.

// Entries of the main file. "rows/FOLDER/FILE" has the names of the file's tensors, and "OBJECT/files" the place of an
// object's own checkpoint. Two have the folder of the files with tables, and how many servers have written some.
// "servers/uncounted/NUMBER" has the results of a step that the checkpoint does not count.
inline constexpr const char* kListedRows = "rows/";
inline constexpr const char* kListedFiles = "/files";
inline constexpr const char* kTablesFolder = "servers/tables/folder";
inline constexpr const char* kTablesServers = "servers/tables/servers";
inline constexpr const char* kUncountedSteps = "servers/uncounted/";

// Returns the results of the steps that a checkpoint does not count, none where it was made without servers:
// [step][number].
std::vector<std::vector<double>> uncounted_steps(const Archive& main);

// The places in PATH.rows that a main file's entries name. Names that would lead out of PATH.rows are left out.
std::vector<std::string> listed_places(const std::map<std::string, std::string>& entries);

// PATH.rows.
std::filesystem::path rows_folder(const std::string& path);

// The folder that one save writes into. The folder is locked while this lives, so that no other job removes it; without
// `keep` the destructor removes what was written.
class RowsFolder {
 public:
  // Makes the folder, and removes before what killed saves to `path` have left. Throws IoError, also where PATH.rows is
  // a symbolic link or a file: then nothing has changed.
  explicit RowsFolder(const std::string& path);
  ~RowsFolder();
  RowsFolder(const RowsFolder&) = delete;
  RowsFolder& operator=(const RowsFolder&) = delete;

  const std::string& name() const { return name_; }  // in PATH.rows
  std::filesystem::path folder() const { return rows_folder(path_) / name_; }

  // Called once the main file lists this folder: removes the folders of earlier saves, but those that the main file
  // lists.
  void keep();

 private:
  const std::string path_, name_;
  std::unique_ptr<FolderLock> lock_;
  bool kept_ = false;
};

// Removes the folders of saves in PATH.rows, once a main file without rows has taken the place of one with rows.
void remove_rows(const std::string& path);

// Removes the main file and its rows; does nothing where there are none. Files that Lockstep did not write stay, with a
// warning. The second function throws IoError.
void remove_checkpoint(const std::string& path, std::error_code& failed);
void remove_checkpoint(const std::string& path);

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
