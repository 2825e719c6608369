// What `lockstep run --timeline` writes.
#pragma once

#include <iosfwd>
#include <string>

#include "lockstep/cluster/store.h"

namespace lockstep::launch {

// Throws IoError where the file cannot be written.
void require_writable(const std::string& path);

// The timelines that the ranks of a job have left in its store, in one file for chrome://tracing and ui.perfetto.dev.
// What goes wrong is said on `err`: the job is worth more than its picture.
void write_timelines(const std::string& path, const Store& store, std::ostream& err);

}  // namespace lockstep::launch
