// For tests: ranks that are threads of one process.
#pragma once

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "front_ends/horovod/session.h"
#include "lockstep/collective/make_group.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {

// A Group for each rank, made by all of them at once.
using MakeGroup = std::function<Group(const World&)>;

inline void on_ranks(int size, const MakeGroup& make, const std::function<void(int)>& body, double timeout_seconds) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size};
        const auto group = make(world);
        const Session::Use use(
            std::make_shared<Session>(Session::Position{world}, Communicator(group, timeout_seconds)));
        try {
          body(rank);
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
          group.abort(error.what());
        }
      });
    }
  }
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

inline void on_ranks(int size, const std::function<void(int)>& body, double timeout_seconds = 60) {
  const auto groups = make_thread_groups(size);
  const auto make = [&](const World& world) { return groups[static_cast<std::size_t>(world.rank)]; };
  on_ranks(size, make, body, timeout_seconds);
}

// Runs ranks over TCP, as if each were on a separate host.
inline void on_ranks_over_tcp(int size, const std::function<void(int)>& body) {
  const auto store = Store::hold("127.0.0.1:0");
  const auto make = [&](World world) {
    world.host = "host " + std::to_string(world.rank);
    return make_group(world, store, {.timeout_seconds = 30});
  };
  on_ranks(size, make, body, 60);
}

inline void expect_equal(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  EXPECT_TRUE(at::equal(a, b)) << a << "\nand\n" << b;
}

inline Tensor values(int rank, at::IntArrayRef sizes = {2, 3}, at::ScalarType dtype = at::kDouble) {
  const auto count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kDouble).reshape(sizes) + 10 * rank).to(dtype);
}

}  // namespace lockstep::horovod
