// Lists of strings as bytes: a count, then each with its length; 32-bit little-endian numbers.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cluster {

std::string pack(const std::vector<std::string>& items);

// Nothing where the bytes are not a packed list.
std::optional<std::vector<std::string>> unpack(std::string_view bytes);

}  // namespace lockstep::cluster
