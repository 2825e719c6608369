// Archives as the bytes of a safetensors file.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// The bytes that write_archive writes.
std::string print_archive(const Archive& archive);

// Parses a file's bytes as read_archive does; `file` is for messages.
Archive parse_archive(const std::string& file, std::span<const std::byte> bytes);

}  // namespace lockstep::checkpoint
