// A state: Trackables put together; and how ranks carry one to each other. Torch-free.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// "prefix/name", or the one of them that is not empty.
std::string joined(const std::string& prefix, const std::string& name);

// Puts parts together, each under its name. They are saved in this order. `load` checks all parts before it returns
// their change. Trackable::files of a part are left to the caller.
using Parts = std::vector<std::pair<std::string, Trackable>>;
Trackable compose(Parts parts);

Archive archive_of(const Trackable& state);

// Print a state as bytes for another rank, and check what another rank has printed. `from` names the bytes in messages.
// parse_state returns the change, and throws DataError, and as Trackable::load.
std::string print_state(const Trackable& state);
std::function<void()> parse_state(const std::string& from, std::string_view printed, const Trackable& state);

// Returns rank 0's archive on all ranks; it may be empty elsewhere. Collective.
Archive from_rank_0(const std::string& name, Archive archive, const Communicator& ranks);

// Rank 0 reads the checkpoint, in one file or several, for all ranks: they may not see its disk. Collective. Throws as
// read_archive; DataError on all ranks alike, but for a file of rows.
Archive read_for_all(const std::string& path, const Communicator& ranks);

}  // namespace lockstep::checkpoint
