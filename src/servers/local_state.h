// The buffers of a model whose variables are on parameter servers: workers report them to the chief.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::servers {

// A worker's buffers, such as BatchNorm's running statistics, which it reports to the chief when they have changed.
class ChangedBuffers {
 public:
  explicit ChangedBuffers(const ReplicatedParameters& parameters);

  // Returns the buffers that changed since the last call, by number: their mean over the worker's replicas. The number
  // after the last buffer's has the count of examples that the replicas have seen.
  std::map<int, std::string> take();

 private:
  const ReplicatedParameters& parameters_;
  // [buffer][replica]: hashes, since LibTorch's batch_norm does not count its writes as new versions
  std::vector<std::vector<std::uint64_t>> hashes_;
};

// Gives the chief's buffers the mean of those that the workers reported, by the examples that each has seen. A buffer
// whose dtype is not floating-point gets the value of the worker that has seen most.
void load_reported_buffers(ReplicatedParameters& parameters,
                           const std::map<int, std::map<int, std::string>>& by_worker);

}  // namespace lockstep::servers
