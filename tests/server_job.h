// For tests: the processes of a job with parameter servers, as threads of one process that call each other over
// loopback.
#pragma once

#include "base/text.h"
#include "tests/workers.h"

namespace lockstep {

struct ServerJob {
  int workers = 2, servers = 1;
  bool evaluator = false;
  ParameterServerOptions options = {};
};

// Runs body(options of its strategy) in each process at once; an element is "ps 0: what it threw".
inline std::vector<std::string> run_processes(const ServerJob& job,
                                              const std::function<void(const ParameterServerOptions&)>& body) {
  const auto store = Store::hold("127.0.0.1:0");
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::jthread> threads;
  const std::map<std::string, int> tasks{
      {"chief", 1}, {"worker", job.workers}, {"ps", job.servers}, {"evaluator", job.evaluator ? 1 : 0}};
  int rank = 0;
  for (const char* const type : {"chief", "worker", "ps", "evaluator"}) {
    for (int index = 0; index < tasks.at(type); ++index, ++rank) {
      threads.emplace_back([&, type, index, rank] {
        auto options = job.options;
        if (options.devices.empty()) options.devices = {"cpu:0"};
        options.threads_per_replica = 1;
        options.timeout_seconds = 60;
        options.start_timeout_seconds = 30;
        options.cluster = Cluster{.world = {.rank = rank,
                                            .size = 1 + job.workers + job.servers + tasks.at("evaluator"),
                                            .host = text("host ", rank)},  // so that none is pinned
                                  .store = store.address(),
                                  .source = "a test",
                                  .task_type = type,
                                  .task_index = index,
                                  .tasks = tasks};
        try {
          body(options);
        } catch (const std::exception& error) {
          const std::lock_guard lock(mutex);
          errors.push_back(text(type, " ", index, ": ", error.what()));
        }
      });
    }
  }
  threads.clear();
  return errors;
}

// Runs the job with body(strategy).
inline std::vector<std::string> run_job(const ServerJob& job,
                                        const std::function<void(const ParameterServerStrategy&)>& body) {
  return run_processes(job, [&](const auto& options) { body(ParameterServerStrategy(options)); });
}

inline void expect_no_error(const std::vector<std::string>& errors) { EXPECT_EQ(join(errors, "\n"), ""); }

}  // namespace lockstep
