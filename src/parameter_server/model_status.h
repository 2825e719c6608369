// A model's entry in the job's store, for processes that are started again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/text.h"

namespace lockstep::parameter_server {

inline std::string key_of_model(std::int64_t number) { return text("model ", number); }

// Nothing, one of these, or the model's last checkpoint.
inline constexpr const char* kWritten = "has first values";
inline constexpr const char* kTrained = "is trained";
inline constexpr const char* kDropped = "dropped";

// The model's last checkpoint, also once it is dropped.
inline std::string key_of_last_checkpoint(std::int64_t number) { return text("last checkpoint of model ", number); }

// A checkpoint's file, and the number that the model had in the program that wrote it; none where it was made without
// servers.
struct SavedModel {
  std::string path;
  std::optional<std::int64_t> number;
};
inline std::string print(const SavedModel& saved) {
  return text(saved.number ? std::to_string(*saved.number) : "", ":", saved.path);
}
inline SavedModel parse_checkpoint(const std::string& printed) {
  const auto colon = printed.find(':');
  const auto number = whole_number(printed.substr(0, colon));
  return {printed.substr(colon + 1), number ? std::optional<std::int64_t>(*number) : std::nullopt};
}

}  // namespace lockstep::parameter_server
