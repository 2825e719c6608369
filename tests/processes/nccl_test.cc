// NVIDIA's NCCL, as far as it works without a GPU: LOCKSTEP_NCCL_LIBRARY names it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/expect_says_testing.h"
#include "collective/gpus/nccl.h"
#include "collective/ranks_testing.h"
#include "lockstep/collective/group_wrappers.h"

namespace lockstep::collective::gpus {
namespace {

void expect_one_line(const std::string& message) {
  EXPECT_EQ(std::ranges::count(message, '\n'), 0) << message;
  EXPECT_LT(message.size(), 400) << message;
}

// It listens for the ranks there.
const bool kIsOnLoopback = ::setenv("NCCL_SOCKET_IFNAME", "lo", 1) == 0;

TEST(RealNccl, HasEveryFunctionAndItsVersion) { EXPECT_EQ(name_of_version(nccl().version), LOCKSTEP_NCCL_VERSION); }

TEST(RealNccl, MakesIds) {
  NcclId first, second;
  require_nccl(nccl().ncclGetUniqueId(&first), "ncclGetUniqueId");
  require_nccl(nccl().ncclGetUniqueId(&second), "ncclGetUniqueId");
  EXPECT_NE(first.bytes, second.bytes);
}

TEST(RealNccl, SaysWhyThereIsNoCommunicatorWithoutAGpu) {
  NcclId id;
  require_nccl(nccl().ncclGetUniqueId(&id), "ncclGetUniqueId");
  NcclHandle made = nullptr;
  NcclConfig config;
  int result = nccl().ncclCommInitRankConfig(&made, 1, id, 0, &config);
  const auto is_done = [&] {
    if (result == 7 && made != nullptr) nccl().ncclCommGetAsyncError(made, &result);
    return result != 7;  // ncclInProgress
  };
  EXPECT_TRUE(wait_until(is_done, soon()));
  const auto message = message_of<Error>([&] { require_nccl(result, "ncclCommInitRankConfig", made); });
  expect_says(message, "ncclCommInitRankConfig: unhandled cuda error");
  expect_one_line(message);
}

// A Group says so on all ranks, and goes on.
TEST(RealNccl, AGroupWithoutGpusRefusesTheirBuffers) {
  run_ranks({.size = 2, .group = {.backend = "tcp", .gpu_backend = "nccl"}}, [](const Group& group) {
    double value = 1;
    const Buffer buffer{&value, 1, DType::float64, {MemoryDevice::Type::cuda, 0}};
    const auto message = message_of<InvalidArgument>([&] { group.all_reduce(buffer, ReduceOp::sum, soon()); });
    expect_says(message, "buffers on GPUs need NCCL: rank 0: ");
    expect_one_line(message);
    const Buffer on_host{&value, 1, DType::float64};
    group.all_reduce(on_host, ReduceOp::sum, soon());
    EXPECT_EQ(value, 2);
  });
}

}  // namespace
}  // namespace lockstep::collective::gpus
