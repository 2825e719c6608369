// TPUStrategy: each step is one compiled program that all cores of a TPU run together. Follows
// tf.distribute.TPUStrategy.
#pragma once

#include "lockstep/programs/tpu_cluster_resolver.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

struct TPUStrategyOptions {
  int num_replicas = 0;  // 0: one on each device, of all processes

  // How long the devices may compute one launch, and, with several processes, how long these wait for each other in one
  // call; DeadlineExceeded is thrown then.
  double timeout_seconds = kDefaultTimeoutSeconds;
};

// One replica a core, whose variables stay on the device for the whole training. fit, evaluate and predict trace a
// model's step once for the shapes of its batches, and compile it; so does run for a step function. Traced code may use
// all of torch, but must not read values of tensors, as item() does: an error says where it does.
//
// A TPU of several hosts (a pod): start one program once on each host. All make the same strategies, models and calls
// in the same order. Each gives its own chips their part of each batch. Initial values are those of the process with
// rank 0 (the chief), who alone writes logs and checkpoints. A process that is lost ends the training of all.
class TPUStrategy : public Strategy {
 public:
  // Collective over the processes. Throws what initialize_tpu_system throws, and InvalidArgument
  // - for more replicas than there are devices,
  // - with several processes, for fewer,
  // - and where the processes' strategies differ.
  explicit TPUStrategy(const TPUClusterResolver& resolver = TPUClusterResolver(), TPUStrategyOptions options = {});
};

}  // namespace lockstep
