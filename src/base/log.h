// Warnings and notes for the person at the terminal, on stderr. Any thread may call these.
#pragma once

#include <string>

namespace lockstep {

void log_info(const std::string& message);
void log_warning(const std::string& message);

}  // namespace lockstep
