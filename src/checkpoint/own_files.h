// These functions tell which files are Lockstep's own: a save removes no others. No symbolic link is followed. Any
// thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace lockstep::checkpoint {

// A file is written beside its path under the path, this, and random digits.
inline constexpr const char* kTemporary = ".tmp.";

// Hexadecimal digits. The second function returns true where `name` may be some: earlier versions left out zeros at the
// front.
inline constexpr std::size_t kRandomDigits = 16;
std::string random_digits();
bool has_random_form(const std::string& name);

// True where the open file is regular and begins as those of write_archive do. Reads the header.
bool is_own_archive(int descriptor);
bool is_own_archive(const std::filesystem::path& path);  // false also for a symbolic link, and where there is nothing

// True where there is anything at `path`, be it a symbolic link that leads nowhere. Throws IoError.
bool is_taken(const std::filesystem::path& path);

// Removes an archive of Lockstep's own. Where something else is there, it stays, with a warning. Throws IoError.
void remove_own_archive(const std::filesystem::path& path);

// Throws IoError, naming what is in the way, where a file of somebody else would be lost at `path`.
void require_own_archive_or_nothing(const std::filesystem::path& path);

// Throws IoError where `file` is not a list of a folder's checkpoints: a person may have a file of that name.
inline constexpr std::size_t kLongestIndex = std::size_t{1} << 26;  // bytes
void require_index_or_nothing(const std::filesystem::path& file);

// True where `path` is a regular file of this user's that is no archive, as a crash of the host may leave one.
bool is_damaged_archive(const std::filesystem::path& path);

// Throws IoError where no file can take the place of what is at `path`: a folder, a device, or a link to one.
void require_replaceable(const std::string& path);

// Throws InvalidArgument where others than this user and root own the folder, or may write in it. The text begins with
// `name`, by which the user named the folder, and says what to do.
void require_private_folder(const std::string& name, const std::filesystem::path& folder);

// Removes what killed writers have left in the folder of `path`. These are files with a temporary name of `path`, and
// archives with temporary names of others that nobody has written for an hour. A file that a writer has locked stays.
void remove_left_overs(const std::filesystem::path& path);

}  // namespace lockstep::checkpoint
