// A token that all processes of one user on one host have, for jobs whose launcher gives none.
#pragma once

#include <string>

namespace lockstep::transport {

// Returns the 32 bytes of `home`/.lockstep/token, which only its owner may read, and makes a missing file. Empty where
// nothing can be kept in `home`. Throws ClusterError, naming the file, where others could have read or written it.
std::string user_token(const std::string& home);

// The home folder of the user that this process acts for, by the system's list of users, else by HOME; may be empty.
std::string home_of_user();

// The token in the file `path`: 64 hexadecimal digits. Throws ClusterError that begins with `name`.
std::string read_token(const std::string& name, const std::string& path);

}  // namespace lockstep::transport
