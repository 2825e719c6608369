// For tests: workers as threads of one process.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {

struct WorkerOptions {
  int workers = 2;
  int replicas = 1;  // of each
  CommunicationOptions communication = {};
  bool hosts_differ = false;
};

// Runs body(strategy) on each worker at once; element r is what worker r threw, or empty.
inline std::vector<std::string> run_workers(const WorkerOptions& options,
                                            const std::function<void(const MultiWorkerMirroredStrategy&)>& body) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::string> errors(static_cast<std::size_t>(options.workers));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < options.workers; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<std::string> devices;
      for (int i = 0; i < options.replicas; ++i) devices.push_back("cpu:" + std::to_string(i));
      Cluster cluster{.world = {.rank = rank, .size = options.workers}, .store = store.address()};
      if (options.hosts_differ) cluster.world.host = "host " + std::to_string(rank);
      auto communication = options.communication;
      communication.timeout_seconds = 60;
      try {
        body(MultiWorkerMirroredStrategy({.devices = devices,
                                          .threads_per_replica = 1,
                                          .communication = communication,
                                          .cluster = cluster,
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

}  // namespace lockstep
