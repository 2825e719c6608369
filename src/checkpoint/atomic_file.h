// Files that appear whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace lockstep::checkpoint {

// Writes the parts one after the other to a file beside `path`, flushes it to the disk, and renames it over `path`;
// then flushes the folder, so that the name outlives a power cut too. Makes missing folders. Throws IoError naming the
// file and the reason; the file that was there before is then untouched and nothing is left beside it.
void write_file_atomically(const std::string& path, std::span<const std::span<const std::byte>> parts);

// Makes `folder` if need be, and throws IoError, naming it and the reason, where no file can be written in it.
void require_writable_folder(const std::string& folder);

// The whole file. Throws IoError naming it and the reason.
std::vector<std::byte> read_file(const std::string& path);

}  // namespace lockstep::checkpoint
