// Names of checkpoints such as "weights/{epoch:02d}-{val_loss:.2f}".
#pragma once

#include <functional>
#include <string>

namespace lockstep::train {

// Replaces each {name} and {name:format} by value_of(name), in Python's formats of numbers. Throws InvalidArgument for
// other formats, and for more digits than a file's name has room for.
std::string fill_in(const std::string& path, const std::function<double(const std::string& name)>& value_of);

// The innermost folder of the path that is the same for all checkpoints.
std::string fixed_folder_of(const std::string& filepath);

}  // namespace lockstep::train
