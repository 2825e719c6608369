// What the job's store says of a model, for processes that are started again.
#pragma once

#include <cstdint>
#include <string>

#include "base/text.h"

namespace lockstep::parameter_server {

inline std::string key_of_model(std::int64_t number) { return text("model ", number); }

// Nothing, one of these, or the path of the model's last checkpoint.
inline constexpr const char* kWritten = "has first values";
inline constexpr const char* kTrained = "is trained";
inline constexpr const char* kDropped = "dropped";

// The path of the model's last checkpoint, also once it is dropped.
inline std::string key_of_last_checkpoint(std::int64_t number) { return text("last checkpoint of model ", number); }

}  // namespace lockstep::parameter_server
