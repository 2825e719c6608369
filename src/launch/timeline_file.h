// What `lockstep run --timeline` writes.
#pragma once

#include <iosfwd>
#include <string>

#include "lockstep/cluster/store.h"

namespace lockstep::launch {

// Throws IoError where the file cannot be written.
void require_writable(const std::string& path);

// Writes the timelines in a job's store to one file for chrome://tracing and ui.perfetto.dev. Prints errors on `err`:
// they do not fail the job.
void write_timelines(const std::string& path, const Store& store, std::ostream& err);

}  // namespace lockstep::launch
