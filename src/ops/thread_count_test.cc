// LibTorch's threads of a process that is limited to its share of the cores. The tests change their process, so each
// runs in a process of its own.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "cluster/cpu_partition.h"

namespace lockstep::ops {
namespace {

// Runs a test that is disabled here, without the variables that choose a number of threads.
bool passes_alone(const std::string& test) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto command = "env -u OMP_NUM_THREADS -u MKL_NUM_THREADS '" + program +
                       "' --gtest_also_run_disabled_tests --gtest_filter=ThreadCount.DISABLED_" + test;
  return std::system(command.c_str()) == 0;
}

TEST(ThreadCount, DISABLED_IsThatOfTheCores) {
  cluster::keep_to_partition({.rank = 1, .size = 2});
  EXPECT_LE(at::get_num_threads(), cluster::kept_cpu_count());
}

TEST(ThreadCount, DISABLED_IsTheUsersWhereOneChoseIt) {
  const int chosen = at::get_num_threads() + 3;
  at::set_num_threads(chosen);
  cluster::keep_to_partition({.rank = 1, .size = 2});
  EXPECT_EQ(at::get_num_threads(), chosen);
}

TEST(ThreadCount, IsThatOfTheCores) { EXPECT_TRUE(passes_alone("IsThatOfTheCores")); }
TEST(ThreadCount, IsTheUsersWhereOneChoseIt) { EXPECT_TRUE(passes_alone("IsTheUsersWhereOneChoseIt")); }

}  // namespace
}  // namespace lockstep::ops
