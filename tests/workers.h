// For tests: workers as threads of one process, and what they train.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {

// Returns the names of `count` devices, for replicas: GPUs from number `first` on where there are some, else CPUs.
inline std::vector<std::string> devices_for(int count, int first = 0) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(at::hasCUDA() ? text("cuda:", first + i) : text("cpu:", i));
  return names;
}

struct WorkerOptions {
  int workers = 2;
  int replicas = 1;  // of each
  CommunicationOptions communication = {};
  bool hosts_differ = false;
  bool shard_optimizer_state = false;
  bool elastic = false;
  bool replace_differing_copies = false;
  std::optional<DiLoCoOptions> diloco = {};
  int workers_per_group = 1;
};

// Runs body(strategy) on each worker at once; element r is what worker r threw, or empty.
inline std::vector<std::string> run_workers(const WorkerOptions& options,
                                            const std::function<void(const MultiWorkerMirroredStrategy&)>& body,
                                            std::int64_t compare_copies_every = 100) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::string> errors(static_cast<std::size_t>(options.workers));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < options.workers; ++rank) {
    threads.emplace_back([&, rank] {
      Cluster cluster{.world = {.rank = rank, .size = options.workers}, .store = store.address()};
      if (options.hosts_differ) cluster.world.host = "host " + std::to_string(rank);
      auto communication = options.communication;
      communication.timeout_seconds = 60;
      try {
        body(MultiWorkerMirroredStrategy({.devices = devices_for(options.replicas, rank * options.replicas),
                                          .threads_per_replica = 1,
                                          .communication = communication,
                                          .cluster = cluster,
                                          .shard_optimizer_state = options.shard_optimizer_state,
                                          .elastic = options.elastic ? std::optional(ElasticOptions()) : std::nullopt,
                                          .diloco = options.diloco,
                                          .workers_per_group = options.workers_per_group,
                                          .compare_copies_every = compare_copies_every,
                                          .replace_differing_copies = options.replace_differing_copies,
                                          .start_timeout_seconds = 30}));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) EXPECT_EQ(errors[rank], "") << "worker " << rank;
}

// --- a small model and its data

inline Tensor waves(std::int64_t examples, std::int64_t features) {
  return at::arange(examples * features, at::kDouble).mul(0.7).sin().add(3).view({examples, features});
}

// 26 examples in batches of 7: the last has 5, so that of 6 replicas one is idle.
inline Dataset make_data(at::ScalarType dtype, bool weighted = false) {
  torch::manual_seed(4);
  const auto x = torch::randn({26, 6}, dtype);
  const auto y = torch::randint(3, {26}, torch::kLong);
  return Dataset::from_tensor_slices(x, y, weighted ? torch::rand({26}, dtype) : Tensor());
}

inline Sequential make_model(at::ScalarType dtype, const Optimizer& optimizer) {
  Sequential model({Dense(9, {.activation = "tanh"}), Dense(3)});
  model.compile(
      {.optimizer = optimizer, .loss = SparseCategoricalCrossentropy({.from_logits = true}), .metrics = {"accuracy"}});
  model.build({6}, dtype);
  return model;
}

inline std::vector<Tensor> weights_of(const Model& model, int replica = 0) {
  std::vector<Tensor> weights;
  const auto& parameters = unwrap(model.module());
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    weights.push_back(parameters.parameter(replica, i).detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  return weights;
}

inline double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

inline bool equal_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

// A value of each worker, collected by rank.
template <class T>
class Collected {
 public:
  void add(const MultiWorkerMirroredStrategy& strategy, T value) {
    const std::lock_guard lock(mutex_);
    values_[strategy.worker_rank()] = std::move(value);
  }
  const std::map<int, T>& values() const { return values_; }
  const T& chiefs() const { return values_.at(0); }

 private:
  std::mutex mutex_;
  std::map<int, T> values_;
};

}  // namespace lockstep
