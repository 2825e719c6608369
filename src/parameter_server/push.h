// A worker sends this to a server when it has computed a task.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parameter_server/table.h"

namespace lockstep::parameter_server {

// A worker computes this at a time: one part of one step. A step is one update of each shard, whoever computes it.
struct Task {
  std::int64_t step = 0;
  int part = 0;

  auto operator<=>(const Task&) const = default;
};

struct Push {
  Task task;
  double weight = 0;  // what the sum of gradients is to be divided by; 0: there were no examples

  // [shard of the server]: count() elements of the shard's dtype, or null where a parameter took no part.
  std::vector<const std::byte*> gradients = {};

  // [table]: gradients of the server's rows, for the rows of which the part has some, none of them twice.
  std::vector<Rows> rows = {};

  // Keeps what these point at: a server may read it until the step is applied. Null: what they point at is valid, and
  // stays as it is, while the push is called, and no longer.
  std::shared_ptr<const void> memory = {};

  std::optional<double> learning_rate = {};  // instead of the optimizer's own

  // The chief that gave out the task: chiefs of a job are numbered from 1 on.
  std::int64_t chief = 0;

  std::int64_t finished = 0;  // no other push of a step below this one is on its way
};

}  // namespace lockstep::parameter_server
