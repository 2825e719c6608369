#include "launch/timeline_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <ostream>

#include "base/text.h"
#include "cluster/published_texts.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kForReading(60);  // the store is this process's own

}  // namespace

void require_writable(const std::string& path) {
  errno = 0;
  if (!std::ofstream(path)) throw IoError(text("cannot write the timeline ", path, ": ", std::strerror(errno)));
}

void write_timelines(const std::string& path, const Store& store, std::ostream& err) {
  try {
    std::ofstream file(path);
    file << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
    const char* separator = "";
    for (const auto& events : cluster::published_texts(store, cluster::kTimelines, Deadline::after(kForReading))) {
      if (events.size() <= 2) continue;  // an empty array
      file << separator << events.substr(1, events.size() - 2);
      separator = ",\n";
    }
    file << "]}\n";
    if (!file.flush())
      err << "lockstep run: the timeline " << path << " is not whole: the disk may be full" << std::endl;
  } catch (const Error& error) {
    err << "lockstep run: the timeline " << path << " is not whole: " << error.what() << std::endl;
  }
}

}  // namespace lockstep::launch
