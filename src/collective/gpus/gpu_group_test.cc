// Calls on GPUs: when they return, what their streams see, and how they fail. operations_test has their results.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdio>

#include "base/expect_says_testing.h"
#include "collective/gpus/gpus_testing.h"
#include "collective/ranks_testing.h"

namespace lockstep::collective::gpus {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kDeadline(400);

double seconds_of(const std::function<void()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns whom act()'s DeadlineExceeded names.
std::vector<int> blamed_when(const std::function<void()>& act) {
  try {
    act();
  } catch (const DeadlineExceeded& error) {
    return error.ranks();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// Numbers on the GPU of a rank, and a stream that uses them.
class OnGpu {
 public:
  OnGpu(const Group& group, std::vector<double> values)
      : stream_(group.rank()),
        values_(std::move(values)),
        memory_(stream_.device(), values_.data(), values_.size() * sizeof(double)) {}

  Buffer buffer() const {
    return {memory_.get(),
            values_.size(),
            DType::float64,
            {MemoryDevice::Type::cuda, static_cast<std::int16_t>(stream_.device())}};
  }

  Call all_reduce(ReduceOp op = ReduceOp::sum) const {
    auto call = Call::all_reduce(buffer(), op);
    call.stream = stream_.get();
    return call;
  }

  Call recv(int from) const {
    auto call = Call::recv(buffer(), from);
    call.stream = stream_.get();
    return call;
  }

  // Returns what the stream sees, after all that it was told to do.
  std::vector<double> values() const {
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), 0);
    std::vector<double> read(values_.size());
    memory_.read(read.data());
    return read;
  }

 private:
  const Stream stream_;
  const std::vector<double> values_;
  const GpuMemory memory_;
};

class GpuGroup : public testing::TestWithParam<std::string> {
 protected:
  void TearDown() override {
    simulated_nccl_fault(nullptr, -1);
    simulated_gpu_delay(0);
  }

  // Ranks that can move buffers on GPUs by NCCL alone.
  static std::vector<std::exception_ptr> run(int size, const std::function<void(const Group&)>& body,
                                             const std::string& gpu_backend = "nccl") {
    RankOptions options{.size = size};
    options.group.backend = GetParam();
    options.wrap = [&](const Group& group) { return with_gpus(group, gpu_backend); };
    return run_ranks(options, body);
  }

  // Makes a call with `fault` on rank 1, and expects that each rank throws in time what `expect` expects. Another Group
  // of the process then works.
  static void expect_failure(const char* fault, const std::function<void(int rank, const std::string&)>& expect) {
    std::barrier all_ranks(3);
    expect_no_errors(run(3, [&](const Group& group) {
      const OnGpu one(group, {1});
      if (std::string(fault).starts_with("init")) {
        if (group.rank() == 0) simulated_nccl_fault(fault, 1);
      } else {
        group.run(one.all_reduce(), soon());
        group.synchronize(soon());
        if (group.rank() == 0) simulated_nccl_fault(fault, 1);
      }
      all_ranks.arrive_and_wait();
      std::string message;
      const auto took = seconds_of([&] {
        message = message_of<Error>([&] {
          group.run(one.all_reduce(), Deadline::after(kDeadline));
          group.synchronize(soon());
        });
      });
      expect(group.rank(), message);
      EXPECT_LT(took, std::chrono::duration<double>(kDeadline).count() + 2);
      EXPECT_THROW(group.check(soon()), Error);
      EXPECT_THROW(group.run(one.all_reduce(), soon()), Error);
      EXPECT_THROW(group.barrier(soon()), Error);
    }));
    simulated_nccl_fault(nullptr, -1);
    expect_no_errors(run(3, [](const Group& group) {
      const OnGpu one(group, {1});
      group.run(one.all_reduce(), soon());
      EXPECT_EQ(one.values(), std::vector<double>{3});
    }));
  }
};

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

TEST_P(GpuGroup, ARankThatDoesNotComeIsNamed) {
  expect_no_errors(run(3, [](const Group& group) {
    const OnGpu values(group, {1});
    group.run(values.all_reduce(), soon());
    group.synchronize(soon());
    if (group.rank() == 2) {
      const auto has_failed = [&] {
        try {
          group.check(soon());
          return false;
        } catch (const Error&) {
          return true;
        }
      };
      EXPECT_TRUE(wait_until(has_failed, Deadline::after(std::chrono::seconds(20))));
      EXPECT_THROW(group.run(values.all_reduce(), soon()), Error);
      return;
    }
    std::string message;
    const auto took = seconds_of([&] {
      group.run(values.all_reduce(), Deadline::after(kDeadline));
      message = message_of<DeadlineExceeded>([&] { group.synchronize(soon()); });
    });
    expect_says(message, "all_reduce");
    expect_says(message, "rank 2");
    EXPECT_LT(took, std::chrono::duration<double>(kDeadline).count() + 2);
  }));
}

TEST_P(GpuGroup, ARankThatDoesNotComeIsNamedAlsoByRanksWithLaterDeadlines) {
  constexpr int kLate = 3, kFirstToGiveUp = 1;
  expect_no_errors(run(4, [](const Group& group) {
    const OnGpu values(group, {1});
    group.run(values.all_reduce(), soon());
    group.synchronize(soon());
    const auto blamed = blamed_when([&] {
      if (group.rank() == kLate) {
        while (true) group.check(soon());
      }
      const bool is_first = group.rank() == kFirstToGiveUp;
      group.run(values.all_reduce(), is_first ? Deadline::after(kDeadline) : soon());
      group.synchronize(soon());
    });
    EXPECT_EQ(blamed, std::vector<int>{kLate});
  }));
}

// Rank 2 waits for rank 1, which waits for rank 0, which makes no call. Nobody waits for rank 3.
TEST_P(GpuGroup, AMessageThatDoesNotComeIsBlamedOnTheRankThatWaitsForNobody) {
  for (const bool in_chain : {false, true}) {
    expect_no_errors(run(4, [&](const Group& group) {
      const OnGpu value(group, {1});
      group.run(value.all_reduce(), soon());
      group.synchronize(soon());
      if (group.rank() == 0 || group.rank() == 3 || (group.rank() == 2 && !in_chain)) {
        EXPECT_THROW(while (true) group.check(soon()), DeadlineExceeded);
        return;
      }
      const bool is_first = group.rank() == (in_chain ? 2 : 1);
      const auto blamed = blamed_when([&] {
        group.run(value.recv(group.rank() - 1), is_first ? Deadline::after(kDeadline) : soon());
        group.synchronize(soon());
      });
      if (in_chain) {
        EXPECT_EQ(blamed, (std::vector<int>{0, 3}));
      } else {
        EXPECT_EQ(blamed, std::vector<int>{0});
      }
    }));
  }
}

TEST_P(GpuGroup, ACallThatIsStuckEndsAtItsDeadline) {
  expect_failure("stuck",
                 [](int, const std::string& message) { expect_says(message, "all_reduce: gave up after 0."); });
}

TEST_P(GpuGroup, AnAbortThatHangsHoldsNobodyUp) {
  simulated_nccl_fault("abort-hangs", 0);
  expect_failure("stuck",
                 [](int, const std::string& message) { expect_says(message, "all_reduce: gave up after 0."); });
}

TEST_P(GpuGroup, AnInitThatNeverEndsEndsAtItsDeadline) {
  expect_failure("init-never-ends", [](int, const std::string& message) {
    expect_says(message, "ncclCommInitRankConfig: gave up after 0.");
  });
}

TEST_P(GpuGroup, AnErrorOfNcclIsHeardByAllRanks) {
  for (const char* const fault : {"init-error", "call-error", "async-error"}) {
    expect_failure(fault, [&](int, const std::string& message) {
      expect_says(message, std::string("the test's fault ") + fault);
    });
  }
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

INSTANTIATE_TEST_SUITE_P(Over, GpuGroup, testing::Values("threads", "tcp"));

// Ranks are processes, forked by one that has no threads yet.
class LostRank : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int kLost = 2;

  // Rank `kLost` is killed after the first call. Prints what the others' second call says.
  static void run(int rank, const std::string& store) {
    const World world{.rank = rank, .size = 3, .host = "host"};
    const GroupOptions options{.backend = GetParam(), .gpu_backend = "nccl", .checked_calls = 0};
    const auto group = make_group(world, Store::connect(store, soon()), options);
    const OnGpu one(group, {1});
    group.run(one.all_reduce(), soon());
    group.synchronize(soon());
    if (rank == kLost) ::raise(SIGKILL);
    std::string said;
    const auto took = seconds_of([&] {
      said = message_of<PeerLost>([&] {
        group.run(one.all_reduce(), soon());
        group.synchronize(soon());
      });
    });
    std::fprintf(stderr, "%s (%s)\n", said.c_str(), took < 2 ? "soon" : "late");
  }

  static void run_all() {
    std::array<int, 2> address{};
    ASSERT_EQ(::pipe(address.data()), 0);
    std::vector<pid_t> others;
    constexpr std::size_t kAddress = 64;
    for (int rank = 1; rank < 3; ++rank) {
      others.push_back(::fork());
      if (others.back() != 0) continue;
      std::array<char, kAddress> read{};
      if (::read(address[0], read.data(), kAddress) == kAddress) run(rank, read.data());
      ::_exit(0);
    }
    const auto store = Store::hold("127.0.0.1:0");
    std::array<char, kAddress> written{};
    std::copy_n(store.address().begin(), store.address().size(), written.begin());
    for (int i = 1; i < 3; ++i) ASSERT_EQ(::write(address[1], written.data(), kAddress), kAddress);
    run(0, store.address());
    for (const auto other : others) ::waitpid(other, nullptr, 0);
    std::exit(0);
  }
};

TEST_P(LostRank, IsNamedByTheOthersAtOnce) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_all(), testing::ExitedWithCode(0),
              "lost rank 2 .*during a call on a GPU .soon.\n.*lost rank 2 .*during a call on a GPU .soon.");
}

INSTANTIATE_TEST_SUITE_P(Over, LostRank, testing::Values("shm", "tcp"));

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
