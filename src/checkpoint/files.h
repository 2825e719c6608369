// Files and folders: wrappers of std::filesystem that throw IoError, files that are replaced whole or not at all, and a
// thread that writes.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

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

// Files that appear whole or not at all.

// A file that is written beside `path` and appears there with `commit`; nothing is left without. Makes missing folders,
// and removes first what killed writers have left beside `path`. All throw IoError naming the file and the reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  void append(std::span<const std::byte> bytes);
  void write_at(std::size_t offset, std::span<const std::byte> bytes);
  void commit();

  // The name under which it lies beside `path` until then, for other processes that write to it too.
  const std::string& temporary() const;

 private:
  struct Beside;
  const std::string path_;
  std::unique_ptr<Beside> beside_;
};

// A regular file that is read in any order. Throws IoError as AtomicFile does.
class ReadableFile {
 public:
  explicit ReadableFile(std::string path);
  const std::string& path() const { return path_; }
  std::size_t size() const { return size_; }

  // Fills `bytes`; throws IoError where the file ends before.
  void read(std::size_t offset, std::span<std::byte> bytes) const;

 private:
  const std::string path_;
  const FileDescriptor descriptor_;
  std::size_t size_ = 0;
};

// Writes the parts one after the other to a file beside `path`, flushes the file, and renames it over `path`. Flushes
// the folder too, so that the name outlives a power cut. Makes missing folders. Throws IoError naming the file and the
// reason; the file that was there before is then untouched and nothing is left beside it.
void write_file_atomically(const std::string& path, std::span<const std::span<const std::byte>> parts);

// Makes `folder` if need be, and removes the archives that killed writers have left half written in it. Throws IoError,
// naming the folder and the reason, where no file can be written there.
void require_writable_folder(const std::string& folder);

// Writes the parts one after the other to a file that is there, and flushes it to the disk. Throws IoError naming it
// and the reason.
void write_to_file(const std::string& path, std::size_t offset, std::span<const std::span<const std::byte>> parts);

// The whole regular file. Throws IoError naming it and the reason.
std::vector<std::byte> read_file(const std::string& path);

}  // namespace lockstep::checkpoint
