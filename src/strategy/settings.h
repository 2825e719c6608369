// The decisions of a strategy, of which its implementation is made.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/timeouts.h"
#include "cluster/cpu_partition.h"
#include "elastic/membership.h"
#include "gradient/gradient_path.h"
#include "lockstep/strategy/multi_worker_mirrored_strategy.h"
#include "strategy/kind.h"

namespace lockstep::strategy {

// This process, as a worker among those that train together.
struct WorkerSettings {
  std::shared_ptr<elastic::Membership> membership;  // null: on a mesh that was made of a Communicator
  GroupOptions group;                               // but for how long is waited, which the settings' Timeouts say
  std::optional<ElasticOptions> elastic = {};
  int per_group = 0;  // workers whose gradients are summed in each step; 0: all
};

struct StrategySettings {
  std::vector<std::string> devices;  // one a replica
  int threads_per_replica = 0;       // 0: an equal share of the cores
  cluster::CpuPartition partition = {};
  gradient::Placement placement = gradient::Placement::mirrored;
  gradient::GradientPathOptions gradients = {};

  // How replicas on GPUs sum gradients: as GroupOptions::gpu_backend; empty: in host memory, by `gradients.exchange`.
  std::optional<std::string> gpu_backend = "auto";

  Timeouts timeouts = {};
  std::optional<WorkerBatch> worker_batch = {};
  std::optional<WorkerSettings> workers = {};  // none: this process is alone
  std::shared_ptr<Kind> kind = std::make_shared<Kind>();
};

}  // namespace lockstep::strategy
