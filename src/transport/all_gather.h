// How ranks exchange texts before they are connected.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::transport {

// Tells every rank's text to every rank, in the order of ranks.
using AllGather = std::function<std::vector<std::string>(const std::string& mine)>;

// The bytes in hexadecimal digits.
std::string hexadecimal(std::string_view bytes);

// 128 random bits in hexadecimal, so that nobody can guess the name.
std::string random_name();

}  // namespace lockstep::transport
