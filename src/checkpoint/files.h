// Wrappers of std::filesystem that throw IoError.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::checkpoint {

// std::filesystem::exists, absolute and create_directories, which throw IoError naming the path and the reason.
bool file_exists(const std::filesystem::path& path);
std::filesystem::path absolute_path(const std::filesystem::path& path);

// `to`, which does not exist, becomes the file `from`, or a copy where the file system has no hard links.
void link_or_copy(const std::filesystem::path& from, const std::filesystem::path& to);
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

// Creates the missing folders of the path `folder`, and flushes the folders in which one was created.
void make_folders(const std::filesystem::path& folder);

// Flushes a folder's names to the disk. Where the file system cannot (EINVAL: many network and FUSE file systems), the
// folder is left as it is.
void flush_folder(const std::filesystem::path& folder);

// `folder`/`name` if each part of `name` is a plain name, so that it lies in the folder; else an empty path. Names that
// come from a file go through this.
std::filesystem::path path_inside(const std::filesystem::path& folder, const std::string& name);

}  // namespace lockstep::checkpoint
