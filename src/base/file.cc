#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {

namespace {

constexpr std::size_t kAtATime = std::size_t{1} << 16;

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

// O_NONBLOCK: the open of a FIFO would wait for a writer.
FileDescriptor open_regular_file(const std::string& path) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file.open()) throw IoError(text("cannot open ", path, ": ", std::strerror(errno)));
  if (::fstat(file.get(), &info) != 0) throw IoError(text("cannot read ", path, ": ", std::strerror(errno)));
  if (S_ISREG(info.st_mode)) return file;
  throw IoError(text("cannot read ", path, ": it is ", kind_of(info.st_mode), "; it must be a regular file"));
}

std::string read_small_file(const std::string& path, std::size_t most) {
  const auto file = open_regular_file(path);
  std::string contents;
  while (contents.size() <= most) {
    const auto have = contents.size();
    contents.resize(std::min(have + kAtATime, most + 1));
    const auto got = ::read(file.get(), contents.data() + have, contents.size() - have);
    contents.resize(have + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(text("cannot read ", path, ": ", std::strerror(errno)));
    if (got == 0) return contents;
  }
  throw IoError(text("cannot read ", path, ": it has more than ", most, " bytes, which no such file needs"));
}

}  // namespace lockstep
