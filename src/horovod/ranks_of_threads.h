// For tests: ranks that are threads of one process.
#pragma once

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "horovod/session.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {

inline void on_ranks(int size, const std::function<void(int)>& body, double timeout_seconds = 60) {
  const auto groups = make_thread_groups(size);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto index = static_cast<std::size_t>(rank);
        const World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size};
        const Session::Use use(std::make_shared<Session>(Session::Position{world}, groups[index], timeout_seconds));
        try {
          body(rank);
        } catch (const std::exception& error) {
          errors[index] = error.what();
          groups[index].abort(error.what());
        }
      });
    }
  }
  for (const auto& error : errors) EXPECT_EQ(error, "");
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
