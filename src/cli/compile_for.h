// `lockstep compile-for`: compiles a program's steps for a TPU that is not here.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace lockstep::cli {

// Runs `command` so that TPUStrategy compiles for `chips`, such as "v5e:2x4", until it launches its first step, and
// prints what each compiled step needs. Returns the exit status: 0 where all fit, 1 where one does not, else the
// command's. Throws Error where it cannot be started.
int compile_for(const std::string& chips, const std::vector<std::string>& command, std::ostream& out);

}  // namespace lockstep::cli
