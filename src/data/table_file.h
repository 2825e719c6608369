// A cached table as a file: a checkpoint with the tensors x, y and weight.
#pragma once

#include <string>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

std::string table_file(const std::string& path);
void write_table(const std::string& path, const Example& table);
Example read_table(const std::string& path);

}  // namespace lockstep::data
