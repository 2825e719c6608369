// Texts of any size that processes publish in a store for the process that holds it.
#pragma once

#include <string>
#include <vector>

#include "lockstep/cluster/store.h"

namespace lockstep::cluster {

void publish_text(const Store& store, const std::string& kind, const std::string& text, Deadline deadline);

// All of a kind that have come whole, in the order in which they were begun.
std::vector<std::string> published_texts(const Store& store, const std::string& kind, Deadline deadline);

// The kind of timelines: each text is a JSON array of a rank's operations, as chrome://tracing's events.
inline constexpr const char* kTimelines = "timelines";

}  // namespace lockstep::cluster
