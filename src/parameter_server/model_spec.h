// The parts of a model on servers, as all processes of a job know them.
#pragma once

#include <vector>

#include "parameter_server/shard_places.h"
#include "parameter_server/table.h"

namespace lockstep::parameter_server {

struct ModelSpec {
  std::vector<VariableSpec> variables = {};
  std::vector<TableSpec> tables = {};
};

}  // namespace lockstep::parameter_server
