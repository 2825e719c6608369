// The folders with the rows of a checkpoint, which several processes write. Those of PATH.safetensors lie in PATH.rows,
// where each save has a folder of its own. Any thread.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint/folder_lock.h"

namespace lockstep::checkpoint {

// Entries of the main file. "rows/FOLDER/FILE" has the names of the file's tensors, and "OBJECT/files" the place of an
// object's own checkpoint. Two have the folder of the files with tables, and how many servers have written some.
// "servers/uncounted/NUMBER" has the results of a step that the checkpoint does not count.
inline constexpr const char* kListedRows = "rows/";
inline constexpr const char* kListedFiles = "/files";
inline constexpr const char* kTablesFolder = "servers/tables/folder";
inline constexpr const char* kTablesServers = "servers/tables/servers";
inline constexpr const char* kUncountedSteps = "servers/uncounted/";

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

}  // namespace lockstep::checkpoint
