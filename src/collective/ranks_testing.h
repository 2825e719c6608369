// For tests: ranks as threads of one process, on any backend.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "lockstep/collective/make_group.h"
#include "transport/network_channels.h"

namespace lockstep::collective {

// The backends of this build whose ranks may be processes.
inline std::vector<std::string> backends() {
  std::vector<std::string> names{"shm", "tcp", "hierarchical"};
  if (transport::ucx_is_built()) names.push_back("ucx");
  return names;
}

struct RankOptions {
  int size = 2;
  GroupOptions group;
  int ranks_per_host = 1 << 20;  // of ranks in order
  std::function<Group(const Group&)> wrap = [](const Group& made) { return made; };
};

// Runs body(group) on one thread a rank; element r is what rank r threw.
inline std::vector<std::exception_ptr> run_ranks(const RankOptions& options,
                                                 const std::function<void(const Group&)>& body) {
  const auto store = Store::hold("127.0.0.1:0");
  const auto threads_groups =
      options.group.backend == "threads" ? make_thread_groups(options.size, 100) : std::vector<Group>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options.size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < options.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto index = static_cast<std::size_t>(rank);
        if (!threads_groups.empty()) return body(options.wrap(threads_groups[index]));
        const World world{
            .rank = rank, .size = options.size, .host = "host " + std::to_string(rank / options.ranks_per_host)};
        body(options.wrap(make_group(world, Store::connect(store.address(), Deadline::after(std::chrono::seconds(30))),
                                     options.group)));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  threads.clear();
  return errors;
}

inline void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    try {
      if (errors[rank]) std::rethrow_exception(errors[rank]);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
    }
  }
}

inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

}  // namespace lockstep::collective
