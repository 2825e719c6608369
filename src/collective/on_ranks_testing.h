// For tests: ranks as threads of one process.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "lockstep/collective/group.h"

namespace lockstep::collective {

// Runs body(group) on one thread a rank. An exception on one thread fails the test and aborts the others.
template <class Body>
void on_ranks(int size, const Body& body) {
  const auto groups = make_thread_groups(size);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto index = static_cast<std::size_t>(rank);
        try {
          body(groups[index]);
        } catch (const std::exception& error) {
          errors[index] = error.what();
          groups[index].abort(error.what());
        }
      });
    }
  }
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

}  // namespace lockstep::collective
