// The subcommands' functions.
#pragma once

#include <iosfwd>
#include <string>

namespace lockstep::cli {

// The cores that this process may use, and what bounds them.
void print_devices(std::ostream& out);

// Names, dtypes, shapes and entries of a checkpoint; of a folder, of its latest one. Throws as read_archive.
void print_checkpoint(const std::string& path, std::ostream& out);

}  // namespace lockstep::cli
