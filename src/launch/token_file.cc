#include "launch/token_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/all_gather.h"

namespace lockstep::launch {

TokenFile::TokenFile() : TokenFile(transport::random_name() + transport::random_name()) {}

TokenFile::TokenFile(const std::string& digits)
    : digits_(digits), memory_(memfd_create("lockstep token", MFD_CLOEXEC)) {
  if (!memory_.open() || fchmod(memory_.get(), S_IRUSR) != 0 ||
      write(memory_.get(), digits.data(), digits.size()) != static_cast<ssize_t>(digits.size())) {
    throw ClusterError(text("cannot keep the job's token in memory: ", std::strerror(errno)));
  }
  path_ = text("/proc/", getpid(), "/fd/", memory_.get());
  access_ = access_of(
      [this](const char* name) { return std::strcmp(name, kTokenFileVariable) == 0 ? path_.c_str() : nullptr; });
}

}  // namespace lockstep::launch
