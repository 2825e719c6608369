// Calls on GPUs: when they return, what their streams see, and what wrappers see. operations_test has their results.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/expect_says_testing.h"
#include "collective/gpus/gpus_testing.h"
#include "collective/ranks_testing.h"

namespace lockstep::collective::gpus {
namespace {

using std::chrono::milliseconds;

class GpuGroup : public GroupsOnGpus {};

TEST_P(GpuGroup, CallsReturnBeforeTheyAreDoneAndTheirStreamWaitsForThem) {
  expect_no_errors(run(2, [](const Group& group) {
    const OnGpu values(group, {1, 2});
    group.run(values.all_reduce(), soon());  // connects the ranks
    group.synchronize(soon());
    constexpr milliseconds kWork(100);
    if (group.rank() == 0) simulated_gpu_delay(std::chrono::microseconds(kWork).count());
    group.barrier(soon());
    EXPECT_LT(seconds_of([&] { group.run(values.all_reduce(), soon()); }),
              std::chrono::duration<double>(kWork).count());
    EXPECT_EQ(values.values(), (std::vector<double>{4, 8}));
  }));
}

TEST_P(GpuGroup, AStartedCallIsSeenByItsStreamAfterTheWait) {
  expect_no_errors(run(2, [](const Group& group) {
    const OnGpu first(group, {1}), second(group, {10});
    group.run(first.all_reduce(), soon());
    group.synchronize(soon());
    if (group.rank() == 0) simulated_gpu_delay(50'000);
    group.barrier(soon());
    const auto work = group.start({first.all_reduce(), second.all_reduce(ReduceOp::max)}, soon());
    EXPECT_FALSE(work.done());
    EXPECT_EQ(first.values(), std::vector<double>{2});  // nothing has told this stream to wait
    work.wait();
    EXPECT_EQ(first.values(), std::vector<double>{4});
    EXPECT_EQ(second.values(), std::vector<double>{10});
    EXPECT_TRUE(work.done());
  }));
}

TEST_P(GpuGroup, CallsOfAGroupThatIsGoneAreDone) {
  expect_no_errors(run(2, [](const Group& group) {
    const OnGpu values(group, {1});
    {
      const auto passing = group.split(0, group.rank(), soon());
      passing->run(values.all_reduce(), soon());
    }
    EXPECT_EQ(values.values(), std::vector<double>{2});
  }));
}

TEST_P(GpuGroup, TwoRanksOfAGpuGoThroughHostMemoryOrAreRefused) {
  for (const std::string gpu_backend : {"auto", "nccl"}) {
    expect_no_errors(run(
        2,
        [&](const Group& group) {
          std::vector<double> value{3};
          const GpuMemory memory(0, value.data(), sizeof(double));
          const Buffer buffer{memory.get(), 1, DType::float64, {MemoryDevice::Type::cuda, 0}};
          if (gpu_backend == "nccl") {
            expect_says(message_of<InvalidArgument>([&] { group.all_reduce(buffer, ReduceOp::sum, soon()); }),
                        "ranks 0 and 1 use one GPU");
            group.barrier(soon());
            return;
          }
          group.all_reduce(buffer, ReduceOp::sum, soon());
          memory.read(value.data());
          EXPECT_EQ(value[0], 6);
        },
        gpu_backend));
  }
}

TEST_P(GpuGroup, BuffersOnSeveralDevicesAreNamed) {
  expect_no_errors(run(2, [](const Group& group) {
    const OnGpu own(group, {1});
    std::vector<double> host{1, 2};
    auto other = own.buffer();
    other.device.index = 7;
    const auto says = [&](const std::function<void()>& act, const std::string& part) {
      expect_says(message_of<InvalidArgument>(act), part);
    };
    says([&] { group.all_gather(own.buffer(), buffer_of(host), soon()); }, "is on host, the other one on cuda:");
    says(
        [&] {
          group.run({Call::broadcast(own.buffer(), 0), Call::broadcast(buffer_of(host), 0)}, soon());
        },
        "all must be on one device");
    group.run(own.all_reduce(), soon());
    says([&] { group.all_reduce(other, ReduceOp::sum, soon()); }, "a Group has one GPU a rank");
    says([&] { with_gpus(group, "gpu"); }, "there is no gpu_backend \"gpu\"; there are auto, nccl and host");
  }));
}

TEST_P(GpuGroup, ACallOnAStreamThatIsCapturedIsRefused) {
  for (const std::string gpu_backend : {"nccl", "host"}) {
    expect_no_errors(run(
        2,
        [](const Group& group) {
          const OnGpu value(group, {1});
          void* graph = nullptr;
          ASSERT_EQ(cudaStreamBeginCapture(value.stream(), 1), 0);
          expect_says(message_of<InvalidArgument>([&] { group.run(value.all_reduce(), soon()); }),
                      "all_reduce: the call's stream is being captured into a CUDA graph");
          ASSERT_EQ(cudaStreamEndCapture(value.stream(), &graph), 0);
          group.run(value.all_reduce(), soon());
          EXPECT_EQ(value.values(), std::vector<double>{2});
        },
        gpu_backend));
  }
}

// In the global mode of captures no thread may ask for events, unless it says that it leaves captures alone.
TEST_P(GpuGroup, CallsAreWatchedWhileAnotherStreamIsCaptured) {
  constexpr milliseconds kWork(50);
  expect_no_errors(run(2, [&](const Group& group) {
    const OnGpu value(group, {1}), other(group, {0});
    group.run(value.all_reduce(), soon());
    group.synchronize(soon());
    if (group.rank() == 0) simulated_gpu_delay(std::chrono::microseconds(kWork).count());
    group.barrier(soon());
    group.run(value.all_reduce(), soon());
    void* graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(other.stream(), 0), 0);
    group.synchronize(soon());
    ASSERT_EQ(cudaStreamEndCapture(other.stream(), &graph), 0);
    EXPECT_EQ(value.values(), std::vector<double>{4});
  }));
}

// A fault keeps NCCL from making ids, so a split can only be made from the Group's own communicator.
TEST_P(GpuGroup, ASplitOfConnectedRanksIsMadeFromTheirCommunicator) {
  expect_no_errors(run(5, [](const Group& group) {
    const OnGpu own(group, {1.0 + group.rank()});
    group.run(own.all_reduce(), soon());  // is not waited for
    if (group.rank() == 0) simulated_nccl_fault("no-id", -1);
    group.barrier(soon());
    const int color = group.rank() == 1 ? -1 : group.rank() % 2;  // 0, 2 and 4; and 3 alone
    const auto part = group.split(color, -group.rank(), soon());
    ASSERT_EQ(part == nullptr, group.rank() == 1);
    EXPECT_EQ(own.values(), std::vector<double>{15});
    if (!part || part->size() == 1) return;
    const OnGpu mine(group, {1.0 * group.rank()}), all(group, {0, 0, 0});
    part->run(Call::all_gather(mine.buffer(), all.buffer()), soon());
    part->synchronize(soon());
    EXPECT_EQ(all.values(), (std::vector<double>{4, 2, 0}));
  }));
}

TEST_P(GpuGroup, ASplitThatNeverEndsEndsAtItsDeadline) {
  expect_no_errors(run(2, [](const Group& group) {
    const OnGpu one(group, {1});
    group.run(one.all_reduce(), soon());
    group.synchronize(soon());
    if (group.rank() == 0) simulated_nccl_fault("init-never-ends", 1);
    group.barrier(soon());
    expect_says(message_of<Error>([&] { group.split(0, 0, Deadline::after(milliseconds(300))); }),
                "ncclCommSplit: gave up after 0.");
    EXPECT_THROW(group.run(one.all_reduce(), soon()), Error);
  }));
}

TEST_P(GpuGroup, ATimelineHasATrackForEachGpu) {
  const std::string path = testing::TempDir() + "/timeline_of_gpus_" + GetParam() + ".json";
  constexpr milliseconds kWork(30);
  expect_no_errors(run(2, [&](const Group& group) {
    Timeline timeline;
    const auto recorded = with_timeline(group, timeline, soon());
    const OnGpu first(group, {1}), second(group, {2, 3});
    recorded.run(first.all_reduce(), soon());
    recorded.synchronize(soon());
    if (group.rank() == 0) simulated_gpu_delay(std::chrono::microseconds(kWork).count());
    recorded.barrier(soon());
    recorded.run({first.all_reduce(), second.all_reduce()}, soon());
    recorded.run(second.all_reduce(), soon());
    timeline.write(path, recorded, soon());
  }));
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  std::map<int, std::vector<std::string>> operations;
  std::map<int, double> end;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X" || event["args"]["algorithm"] != "NCCL") continue;
    const int track = event["tid"];
    operations[track].push_back(event["name"].get<std::string>() + " " + event["args"]["bytes"].dump());
    constexpr double kRounding = 1e-3;
    EXPECT_GE(event["ts"].get<double>() + kRounding, end[track]);
    end[track] = event["ts"].get<double>() + event["dur"].get<double>();
    if (operations[track].size() == 2) {
      EXPECT_GE(event["dur"].get<double>(), std::chrono::microseconds(kWork).count());
    }
  }
  ASSERT_EQ(operations.size(), 2);
  for (const auto& [track, names] : operations) {
    EXPECT_GT(track, 1);
    EXPECT_EQ(names, (std::vector<std::string>{"all_reduce 8", "all_reduce and 1 more 24", "all_reduce 16"}));
  }
}

TEST_P(GpuGroup, FaultsHappenInCallsOnGpus) {
  for (const bool before : {true, false}) {
    expect_no_errors(run(2, [&](const Group& group) {
      std::vector<Fault> faults;
      if (before) faults.push_back({.call = 1, .action = Fault::Action::error});
      if (!before && group.rank() == 1) {
        faults.push_back({.call = 1, .place = "gpus.enqueued", .action = Fault::Action::abort});
      }
      const auto faulty = with_faults(group, faults);
      const OnGpu value(group, {1});
      faulty.run(value.all_reduce(), soon());
      EXPECT_EQ(value.values(), std::vector<double>{2});
      if (before) {
        expect_says(message_of<Error>([&] { faulty.run(value.all_reduce(), soon()); }),
                    "a fault was injected into call 1");
        return;
      }
      expect_says(message_of<Aborted>([&] {
                    faulty.run(value.all_reduce(), soon());
                    while (true) faulty.check(soon());
                  }),
                  "a fault was injected");
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Over, GpuGroup, testing::Values("threads", "tcp"));

// Ranks of a process that uses the last GPUs alone. Prints which GPUs have a context at the end.
void use_last_gpus() {
  constexpr int kFirst = 3, kRanks = 2;
  run_ranks({.size = kRanks, .group = {.backend = "tcp", .gpu_backend = "nccl"}}, [](const Group& group) {
    const double one = 1;
    const int device = kFirst + group.rank();
    const GpuMemory memory(device, &one, sizeof one);
    const Buffer buffer{memory.get(), 1, DType::float64, {MemoryDevice::Type::cuda, static_cast<std::int16_t>(device)}};
    const auto work = group.start(Call::all_reduce(buffer, ReduceOp::sum), soon());
    EXPECT_TRUE(wait_until([&] { return work.done(); }, soon()));
    group.synchronize(soon());
    const auto half = group.split(group.rank(), 0, soon());
    half->all_reduce(buffer, ReduceOp::sum, soon());
    half->synchronize(soon());
    group.abort("the end of the test");
  });
  for (int device = 0; device < 16; ++device) {
    unsigned flags = 0;
    int is_active = 0;
    EXPECT_EQ(cuDevicePrimaryCtxGetState(device, &flags, &is_active), 0);
    if (is_active == 1) std::fprintf(stderr, "cuda:%d ", device);
  }
  std::exit(0);
}

TEST(ContextsOfGpus, AreMadeWhereBuffersAreAlone) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(use_last_gpus(), testing::ExitedWithCode(0), "^cuda:3 cuda:4 $");
}

// Each begins in a process of its own, which has not loaded NCCL yet.
class WithoutNccl : public testing::Test {
 protected:
  static void expect_said(const char* variable, const char* value, const std::string& part) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    const auto try_it = [&] {
      ::setenv(variable, value, 1);
      std::string said;
      run_ranks({.size = 2, .group = {.backend = "tcp", .gpu_backend = "nccl"}}, [&](const Group& group) {
        const OnGpu one(group, {1});
        const auto message = message_of<InvalidArgument>([&] { group.run(one.all_reduce(), soon()); });
        if (group.rank() == 1) said = message;
      });
      std::fputs(said.c_str(), stderr);
      std::exit(0);
    };
    EXPECT_EXIT(try_it(), testing::ExitedWithCode(0), part);
  }
};

TEST_F(WithoutNccl, TheReasonIsNamedOnAllRanks) {
  expect_said("LOCKSTEP_NCCL_LIBRARY", "/there/is/none.so", "buffers on GPUs need NCCL: rank 0: there is no NCCL: ");
}

TEST_F(WithoutNccl, AnOldVersionIsNamed) {
  expect_said("LOCKSTEP_SIMULATED_NCCL_VERSION", "22605", "has version 2.26.5; it must be 2.27.0 or newer");
}

}  // namespace
}  // namespace lockstep::collective::gpus
