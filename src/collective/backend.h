// What a backend of Group provides. One object a rank; the contract is the one that group.h states for Group.
#pragma once

#include <string>

#include "lockstep/group.h"

namespace lockstep {

class GroupBackend {
 public:
  virtual ~GroupBackend() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void all_reduce(Buffer buffer, ReduceOp op, Deadline deadline) = 0;
  virtual void broadcast(Buffer buffer, int root, Deadline deadline) = 0;
  virtual void all_gather(Buffer input, Buffer output, Deadline deadline) = 0;
  virtual void reduce_scatter(Buffer input, Buffer output, ReduceOp op, Deadline deadline) = 0;
  virtual void barrier(Deadline deadline) = 0;
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace lockstep
