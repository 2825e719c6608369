// What a model has on servers, as all processes of a job know it.
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
