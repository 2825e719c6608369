// Texts in a store: lists of strings as bytes, and texts of any size that processes publish.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/cluster/store.h"

namespace lockstep::cluster {

// Lists of strings as bytes: a count, then each with its length; 32-bit little-endian numbers.
std::string pack(const std::vector<std::string>& items);

// Nothing where the bytes are not a packed list.
std::optional<std::vector<std::string>> unpack(std::string_view bytes);

// Texts of any size that processes publish in a store for the process that holds it.
void publish_text(const Store& store, const std::string& kind, const std::string& text, Deadline deadline);

// All of a kind that have come whole, in the order in which they were begun.
std::vector<std::string> published_texts(const Store& store, const std::string& kind, Deadline deadline);

// The kind of timelines: each text is a JSON array of a rank's operations, as chrome://tracing's events.
inline constexpr const char* kTimelines = "timelines";

}  // namespace lockstep::cluster
