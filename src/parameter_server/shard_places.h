// The parts of a model on servers, as all processes of a job know them, and the servers of the rows of variables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/optimizer/optimizer.h"
#include "lockstep/parameter_server/partitioner.h"
#include "parameter_server/table.h"

namespace lockstep::parameter_server {

// A variable as all processes of a job know it. No dimension is 0.
struct VariableSpec {
  std::string name;
  DType dtype = DType::float32;  // or float64
  std::vector<std::int64_t> shape;
};

// Whole rows of one variable: `count` elements, from `begin` on.
struct ShardPlace {
  std::size_t variable = 0;
  std::int64_t begin = 0, count = 0;
  int server = 0;
};

// A ShardPlace in rows, as checkpoints name them. A scalar has one row.
struct ShardRows {
  std::string variable;
  std::int64_t begin = 0, end = 0;
  std::vector<std::int64_t> shape;

  // The names of the tensors that a checkpoint has of the variable: its values, and its optimizer's states.
  std::vector<std::string> tensors(const std::vector<std::string>& states) const;

  // The names of their rows, in a file that has these alone.
  std::vector<std::string> names(const std::vector<std::string>& states) const;
};
ShardRows rows_of(const std::vector<VariableSpec>& variables, const ShardPlace& place);
std::vector<std::string> names_of_states(const Optimizer& optimizer);

// Cuts the variables by `partitioner` (null: one shard each). Gives the largest shards first, each to the server with
// the fewest bytes, the first where several have. The result is in the order of variables and rows, and depends on the
// arguments alone. Throws InvalidArgument without a server, and, naming the variable, where the partitioner returns
// what it may not.
std::vector<ShardPlace> place_shards(const std::vector<VariableSpec>& variables, const Partitioner& partitioner,
                                     int servers);

struct ModelSpec {
  std::vector<VariableSpec> variables = {};
  std::vector<TableSpec> tables = {};
};

}  // namespace lockstep::parameter_server
