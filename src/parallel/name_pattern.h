// Patterns of the names of modules.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::parallel {

// True where `name` matches `pattern`, in which "*" stands for any characters but a dot.
bool matches(std::string_view pattern, std::string_view name);

bool matches_any(std::string_view pattern, const std::vector<std::string>& names);

// For the message that no name matches: "did you mean blocks.*.qkv?", or which names there are.
std::string suggestion(const std::string& pattern, const std::vector<std::string>& names);

}  // namespace lockstep::parallel
