// Patterns of the names of modules.
#pragma once

#include <string_view>

namespace lockstep::parallel {

// Whether `name` is `pattern`, in which "*" stands for any characters but a dot.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace lockstep::parallel
