// Group's contract on the threads backend: values against a plain loop, order, disagreement, deadline and abort.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "base/failure.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// Runs body(group) on one thread a rank and rethrows what rank r threw as errors[r].
std::vector<std::exception_ptr> run_thread_ranks(int size, const std::function<void(const Group&)>& body,
                                                 int spin = 100) {
  const auto groups = make_thread_groups(size, spin);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(groups[static_cast<std::size_t>(rank)]);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      });
    }
  }
  return errors;
}

void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

template <class E>
std::string message_in(const std::exception_ptr& error) {
  if (!error) return "nothing was thrown";
  try {
    std::rethrow_exception(error);
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another type: ") + e.what();
  }
}

std::vector<double> input_of(int rank, std::size_t count) {
  std::mt19937 generator(static_cast<unsigned>(rank));
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<double> values(count);
  for (double& value : values) value = uniform(generator);
  return values;
}

class AnySize : public testing::TestWithParam<std::tuple<int, std::size_t>> {};

TEST_P(AnySize, AllReduceIsTheSumInRankOrder) {
  const auto [size, count] = GetParam();
  std::vector<double> expected(count);
  for (int rank = 0; rank < size; ++rank) {
    const auto input = input_of(rank, count);
    for (std::size_t i = 0; i < count; ++i) expected[i] = rank == 0 ? input[i] : expected[i] + input[i];
  }
  expect_no_errors(run_thread_ranks(size, [&](const Group& group) {
    auto values = input_of(group.rank(), count);
    group.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
    EXPECT_EQ(values, expected);
  }));
}

TEST_P(AnySize, ReduceScatterAndAllGatherMakeAnAllReduce) {
  const auto [size, count] = GetParam();
  expect_no_errors(run_thread_ranks(size, [&](const Group& group) {
    auto input = input_of(group.rank(), count * static_cast<std::size_t>(group.size()));
    std::vector<double> slice(count);
    std::vector<double> all(input.size());
    group.reduce_scatter(buffer_of(std::span(input)), buffer_of(std::span(slice)), ReduceOp::max, soon());
    group.all_gather(buffer_of(std::span(slice)), buffer_of(std::span(all)), soon());
    group.all_reduce(buffer_of(std::span(input)), ReduceOp::max, soon());
    EXPECT_EQ(all, input);
  }));
}

TEST_P(AnySize, BroadcastGivesEveryRankTheRootsValues) {
  const auto [size, count] = GetParam();
  for (int root = 0; root < size; ++root) {
    expect_no_errors(run_thread_ranks(size, [&, root](const Group& group) {
      auto values = input_of(group.rank(), count);
      group.broadcast(buffer_of(std::span(values)), root, soon());
      EXPECT_EQ(values, input_of(root, count));
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Group, AnySize,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Values(0, 1, 7, 64, 5003)));

template <class T>
void expect_reduction(DType dtype, ReduceOp op, std::vector<T> a, std::vector<T> b, const std::vector<T>& expected) {
  expect_no_errors(run_thread_ranks(2, [&](const Group& group) {
    auto values = group.rank() == 0 ? a : b;
    group.all_reduce({values.data(), values.size(), dtype}, op, soon());
    EXPECT_EQ(values, expected) << name_of(dtype) << " " << name_of(op);
  }));
}

TEST(Group, EveryOperatorAndDtype) {
  expect_reduction<float>(DType::float32, ReduceOp::mean, {1, 4}, {2, -4}, {1.5, 0});
  expect_reduction<float>(DType::float32, ReduceOp::min, {1, 4}, {2, -4}, {1, -4});
  expect_reduction<double>(DType::float64, ReduceOp::product, {1, 4}, {2, -4}, {2, -16});
  expect_reduction<std::int32_t>(DType::int32, ReduceOp::max, {1, -4}, {2, -5}, {2, -4});
  expect_reduction<std::int64_t>(DType::int64, ReduceOp::sum, {1LL << 60, -4}, {1, 4}, {(1LL << 60) + 1, 0});
  expect_reduction<std::uint8_t>(DType::uint8, ReduceOp::sum, {1, 255}, {2, 3}, {3, 2});
  expect_reduction<std::uint16_t>(DType::float16, ReduceOp::sum, {0x3c00, 0x7bff, 1}, {0x4000, 0x7bff, 1},
                                  {0x4200, 0x7c00, 2});  // 1+2=3, 65504*2=inf, two least subnormals
  expect_reduction<std::uint16_t>(DType::bfloat16, ReduceOp::sum, {0x3f80, 0x4380}, {0x4000, 0x3f80},
                                  {0x4040, 0x4380});  // 1+2=3, 256+1=257 rounds to even 256
}

TEST(Group, MinAndMaxKeepNaN) {
  for (const auto op : {ReduceOp::min, ReduceOp::max}) {
    expect_no_errors(run_thread_ranks(2, [op](const Group& group) {
      std::vector<float> values = group.rank() == 0 ? std::vector<float>{NAN, 1} : std::vector<float>{1, NAN};
      group.all_reduce(buffer_of(std::span(values)), op, soon());
      EXPECT_TRUE(std::isnan(values[0]) && std::isnan(values[1]));
    }));
  }
}

TEST(Group, CallsThatDifferAreAnErrorOnEveryRankThatNamesOne) {
  const auto errors = run_thread_ranks(3, [](const Group& group) {
    std::vector<float> values(group.rank() == 2 ? 5 : 4);
    group.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
  });
  for (const auto& error : errors) {
    EXPECT_NE(message_in<InvalidArgument>(error).find("rank 2 calls all_reduce of 5 x float32"), std::string::npos)
        << message_in<InvalidArgument>(error);
  }
}

TEST(Group, ABarrierThatMeetsACollectiveIsAnErrorOnEveryRank) {
  const auto errors = run_thread_ranks(2, [](const Group& group) {
    std::vector<float> values(1000);
    group.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
    if (group.rank() == 0) return group.barrier(soon());
    group.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
  });
  for (const auto& error : errors)
    EXPECT_TRUE(message_in<InvalidArgument>(error).starts_with("the ranks' calls differ"));
}

TEST(Group, BuffersOfDifferentDtypesAreAnErrorOnEveryRank) {
  const auto errors = run_thread_ranks(2, [](const Group& group) {
    std::vector<double> input(4);
    std::vector<float> output(8);
    group.all_gather(buffer_of(std::span(input)), buffer_of(std::span(output)), soon());
  });
  for (const auto& error : errors)
    EXPECT_TRUE(
        message_in<InvalidArgument>(error).starts_with("all_gather: the input is 4 x float64, the output 8 x float32"));
}

TEST(Group, ARankThatNeverComesIsADeadlineExceeded) {
  const auto errors = run_thread_ranks(3, [](const Group& group) {
    if (group.rank() != 1) group.barrier(Deadline::after(std::chrono::milliseconds(50)));
  });
  int exceeded = 0;
  for (const int rank : {0, 2}) {
    const auto message = message_in<Error>(errors[static_cast<std::size_t>(rank)]);
    EXPECT_NE(message.find("gave up after"), std::string::npos) << message;
    if (message_in<DeadlineExceeded>(errors[static_cast<std::size_t>(rank)]).starts_with("barrier")) ++exceeded;
  }
  EXPECT_GE(exceeded, 1);
}

TEST(Group, AbortWakesThoseWhoWaitAndThoseWhoCome) {
  for (const int spin : {0, 1'000'000}) {
    const auto errors = run_thread_ranks(
        3,
        [](const Group& group) {
          if (group.rank() == 1) group.abort("the disk is full");
          group.barrier(soon());
        },
        spin);
    for (const auto& error : errors) {
      EXPECT_EQ(message_in<Aborted>(error), "the group was aborted: the disk is full");
    }
  }
}

TEST(Group, ManyBarriersKeepRanksTogether) {
  constexpr int kRounds = 20000;
  std::vector<int> counts(3);
  expect_no_errors(run_thread_ranks(3, [&](const Group& group) {
    for (int round = 1; round <= kRounds; ++round) {
      counts[static_cast<std::size_t>(group.rank())] = round;
      group.barrier(soon());
      for (const int count : counts) ASSERT_EQ(count, round);
      group.barrier(soon());
    }
  }));
}

TEST(Group, BadSizesAndRootsAreNamed) {
  EXPECT_THROW(make_thread_groups(0), InvalidArgument);
  const auto group = make_thread_groups(1)[0];
  std::vector<float> four(4);
  std::vector<float> five(5);
  EXPECT_THROW(group.broadcast(buffer_of(std::span(four)), 1, soon()), InvalidArgument);
  EXPECT_THROW(group.all_gather(buffer_of(std::span(four)), buffer_of(std::span(five)), soon()), InvalidArgument);
  EXPECT_THROW(group.reduce_scatter(buffer_of(std::span(five)), buffer_of(std::span(four)), ReduceOp::sum, soon()),
               InvalidArgument);
}

// Whoever gives up has its buffers to itself again: it waits for those that are at them.
TEST(ThreadGroup, NobodyIsAtTheBuffersOfARankThatGaveUp) {
  std::atomic<bool> at_work{false};
  const auto errors = run_thread_ranks(2, [&](const Group& group) {
    std::vector<double> values(100'000);
    const auto buffer = buffer_of(std::span(values));
    if (group.rank() == 1) {
      FailHook slowly = [&](const char* place) {
        if (std::string(place) != "direct.remote_access") return;
        at_work = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        at_work = false;
      };
      fail_hook = &slowly;
      group.all_reduce(buffer, ReduceOp::sum, soon());  // the other has done its part
      fail_hook = nullptr;
    } else {
      EXPECT_THROW(group.all_reduce(buffer, ReduceOp::sum, Deadline::after(std::chrono::milliseconds(50))),
                   DeadlineExceeded);
      EXPECT_FALSE(at_work);
    }
  });
  expect_no_errors(errors);
}

TEST(StartedFunction, MakesSeveralCallsInOneTurn) {
  on_ranks(3, [](const Group& group) {
    const auto soon = Deadline::after(std::chrono::seconds(30));
    std::array<std::int64_t, 2> mine{group.rank(), 1};
    const auto act = [&](const Group::RunCalls& run) {
      run({Call::all_reduce(buffer_of(std::span(mine).first(1)), ReduceOp::sum)});
      mine[1] = mine[0] * 10;
      run({Call::all_reduce(buffer_of(std::span(mine).last(1)), ReduceOp::max)});
    };
    const auto work = group.start(act, {}, soon);
    std::int64_t other = 1;
    group.all_reduce(buffer_of(std::span(&other, 1)), ReduceOp::sum, soon);  // after it
    EXPECT_TRUE(work.done());
    work.wait();
    EXPECT_EQ(mine[1], 30);
    EXPECT_EQ(other, 3);
  });
}

TEST(StartedFunction, ThatCallsItsGroupIsRefused) {
  on_ranks(2, [](const Group& group) {
    const auto soon = Deadline::after(std::chrono::seconds(30));
    const auto work = group.start([&](const Group::RunCalls&) { group.barrier(soon); }, {}, soon);
    EXPECT_THROW(work.wait(), InvalidArgument);
    group.barrier(soon);
  });
}

}  // namespace
}  // namespace lockstep::collective
