// How a global batch is divided among replicas.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <vector>

#include "data/stage.h"
#include "lockstep/strategy/distributed_dataset.h"
#include "lockstep/strategy/replica_values.h"

namespace lockstep::internal {

// A replica's part of a global batch, perhaps as rows of a table that are not gathered yet.
struct Part {
  Row row;
  c10::Device device = c10::kCPU;

  Example read() const { return moved(row.materialize()); }  // on the device; a view where the batch lies there

  // Returns an example of this part on the device.
  Example moved(const Example& example) const;
};

}  // namespace lockstep::internal

namespace lockstep::strategy {

using internal::LocalReplicas;
using internal::Part;

// Gives each replica of this process consecutive examples, on its device, in the order of all replicas. Sizes differ by
// one at most, the larger first; some may be 0. Throws InvalidArgument when the batch has no leading dimension.
PerReplica<Part> split_batch(const Example& batch, const LocalReplicas& replicas);

// Throws InvalidArgument unless x, y and weight begin with the same size, as a batch's do.
void check_batch(const Example& batch);

// Distributes by the data set's AutoShardPolicy.
DistributedDataset distribute(const Dataset& data, const LocalReplicas& replicas);

// Returns true where workers read elements of their own, and not parts of the same ones.
bool reads_its_own(const Dataset& data, const LocalReplicas& replicas);

// Returns an epoch's first element, as this worker will read it, for its shape; undefined where there is none.
Example first_element(const Dataset& data, const LocalReplicas& replicas, std::int64_t epoch = 0);

// Does what distribute does, for fit and evaluate. Elements that must be computed are prefetched in a separate thread.
// Data in memory stay there where all replicas are on CPUs: each gathers its part in its own thread. `given`: in place
// of the AutoShardPolicy.
DistributedDataset distribute_ahead(const Dataset& data, const LocalReplicas& replicas,
                                    std::optional<Distribution> given = {});

}  // namespace lockstep::strategy
