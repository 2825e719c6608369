// The token of a job, where its processes can read it and nobody else.
#pragma once

#include <string>

#include "base/file_descriptor.h"
#include "lockstep/transport/access.h"

namespace lockstep::launch {

class TokenFile {
 public:
  // Makes a memory file that other processes of this user can open while this object lives. It holds a new token, or
  // the one in these hexadecimal digits. Throws ClusterError.
  TokenFile();
  explicit TokenFile(const std::string& digits);

  const std::string& digits() const { return digits_; }

  const Access& access() const { return access_; }

  // For LOCKSTEP_TOKEN_FILE.
  const std::string& path() const { return path_; }

 private:
  std::string digits_;
  FileDescriptor memory_;
  std::string path_;
  Access access_;
};

}  // namespace lockstep::launch
