// For tests: a disk that can be filled.
#pragma once

#include <sys/mount.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace lockstep {

// A file system of one megabyte.
class SmallDisk {
 public:
  explicit SmallDisk(std::filesystem::path folder) : folder_(std::move(folder)) {
    if (mount("none", folder_.c_str(), "tmpfs", 0, "size=1m") != 0) {
      throw std::runtime_error(std::string("cannot mount a file system: ") + std::strerror(errno));
    }
  }
  ~SmallDisk() { umount2(folder_.c_str(), MNT_DETACH); }
  void fill() const {
    std::ofstream filler(folder_ / "filler");
    for (const std::string bytes(1 << 16, 'x'); filler << bytes << std::flush;) {
    }
  }
  void make_room() const { std::filesystem::remove(folder_ / "filler"); }

 private:
  const std::filesystem::path folder_;
};

}  // namespace lockstep
