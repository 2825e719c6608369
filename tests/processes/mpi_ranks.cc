// One rank of a Group of the backend "mpi", in a process that an mpirun starts; for mpi_test.py. Without a mode it runs
// the tests below, which all ranks run together. Modes: see the end.
#include <gtest/gtest.h>

#include <cstring>
#include <iostream>
#include <limits>
#include <thread>

#include "base/text.h"
#include "collective/mpi/library.h"
#include "collective/operations_testing.h"
#include "lockstep/collective/group_wrappers.h"
#include "lockstep/elastic/job.h"

namespace lockstep::collective {
namespace {

const Job& job() {
  static const auto one = Job::from_environment();
  return one;
}

// The Group of a Job of one process has no need of a network.
Group make() {
  const GroupOptions options{.backend = "mpi"};
  return job().size() > 1 ? job().group(options) : make_group({}, Store::hold("127.0.0.1:0"), options);
}

const Group& group() {
  static const auto one = make();
  return one;
}

// A Group that all ranks have before one of them makes it fail.
Group make_to_fail() {
  auto made = make();
  group().barrier(soon());
  return made;
}

Deadline after(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

void expect_sum(const Group& ranks) {
  std::vector<float> values(10'000, static_cast<float>(ranks.rank() + 1));
  ranks.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
  EXPECT_EQ(values, std::vector<float>(10'000, static_cast<float>(ranks.size() * (ranks.size() + 1)) / 2));
}

TEST(Mpi, IsChosenByName) { EXPECT_EQ(group().backend(), "mpi"); }
TEST(Mpi, Reductions) { check_reductions(group()); }
TEST(Mpi, Distributions) { check_distributions(group()); }
TEST(Mpi, MessagesInAnyOrderOfSizes) { check_messages(group()); }
TEST(Mpi, GroupedCallsGiveWhatSingleOnesDo) { check_grouped_calls(group()); }
TEST(Mpi, SplitMakesGroupsThatWork) { check_split(group()); }
TEST(Mpi, MeansOf16BitsDoNotOverflowOnTheWay) { check_means_of_16_bits(group()); }

TEST(Mpi, Booleans) {
  for (const auto op : {ReduceOp::min, ReduceOp::max}) {
    const bool last = group().rank() == group().size() - 1;
    std::array<bool, 3> values{true, false, last};
    group().all_reduce(buffer_of(values), op, soon());
    EXPECT_EQ(values, (std::array{true, false, op == ReduceOp::max || group().size() == 1}));
  }
}

TEST(Mpi, ANaNWinsAndZerosHaveOneSignOnAllRanks) {
  for (const auto op : {ReduceOp::min, ReduceOp::max}) {
    const bool odd = group().rank() % 2 == 1;
    std::vector<double> values(5000, odd ? -0.0 : 0.0);
    if (group().rank() == group().size() - 1) values[1] = std::numeric_limits<double>::quiet_NaN();
    group().all_reduce(buffer_of(std::span(values)), op, soon());
    EXPECT_TRUE(std::isnan(values[1]));
    auto of_first = values;
    group().broadcast(buffer_of(std::span(of_first)), 0, soon());
    EXPECT_EQ(0, std::memcmp(of_first.data(), values.data(), values.size() * sizeof(double)));
  }
}

// Reductions go in rounds of a MiB a rank.
TEST(Mpi, ReductionsOfSeveralRounds) {
  const auto ranks = static_cast<std::size_t>(group().size());
  const std::size_t each = 700'001, count = each * ranks;
  for (const auto op : {ReduceOp::sum, ReduceOp::min}) {
    for (const bool allocated : {false, true}) {
      const Field values(group(), DType::float32, inputs(group().rank(), count), allocated);
      const Field part(group(), DType::float32, Values(each), allocated);
      group().reduce_scatter(values.buffer(), part.buffer(), op, soon());
      const auto begin = each * static_cast<std::size_t>(group().rank());
      EXPECT_TRUE(part.holds(reductions(op, group().size(), begin, begin + each)));
      group().all_reduce(values.buffer(), op, soon());
      EXPECT_TRUE(values.holds(reductions(op, group().size(), 0, count)));
    }
  }
}

// Other calls go in rounds of 64 MiB.
TEST(Mpi, BuffersOfSeveralRounds) {
  if (group().size() != 2) return;
  const std::size_t each = (std::size_t{70} << 20) + 3;
  const int me = group().rank();
  for (const bool allocated : {false, true}) {
    const auto memory = allocated ? group().allocate(3 * each) : Memory(new std::byte[3 * each]);
    const std::span all(reinterpret_cast<std::uint8_t*>(memory.get()), 2 * each);
    const std::span mine(all.data() + 2 * each, each);
    const auto holds = [&](std::span<const std::uint8_t> values, int rank) {
      return std::all_of(values.begin(), values.end(), [&](auto value) { return value == 10 + rank; });
    };
    std::fill(mine.begin(), mine.end(), static_cast<std::uint8_t>(10 + me));
    group().run(Call::all_gather(buffer_of(mine), buffer_of(all), {each, each}), soon());
    EXPECT_TRUE(holds(all.first(each), 0) && holds(all.last(each), 1));
    if (me == 0) group().send(buffer_of(mine), 1, soon());
    if (me == 1) group().recv(buffer_of(mine), 0, soon());
    EXPECT_TRUE(holds(mine, 0));
    group().run(Call::scatter(buffer_of(all), buffer_of(mine), 1), soon());
    EXPECT_TRUE(holds(mine, me));
  }
}

TEST(Mpi, GathersWhatIsInItsPlaceAlready) {
  const auto ranks = static_cast<std::size_t>(group().size());
  const std::size_t each = 5000;
  const auto memory = group().allocate(ranks * each * sizeof(float));
  const std::span all(reinterpret_cast<float*>(memory.get()), ranks * each);
  const auto mine = all.subspan(each * static_cast<std::size_t>(group().rank()), each);
  std::fill(mine.begin(), mine.end(), static_cast<float>(group().rank()));
  group().all_gather(buffer_of(mine), buffer_of(all), soon());
  for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<float>(i / each));
}

TEST(Mpi, CallsThatDifferAreRefusedOnAllRanks) {
  if (group().size() == 1) return;
  const auto ranks = make();
  std::vector<float> values(group().rank() == 0 ? 3 : 4);
  EXPECT_THROW(ranks.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon()), InvalidArgument);
  expect_sum(ranks);
}

TEST(Mpi, AMessageOfAnotherLengthIsRefused) {
  if (group().size() == 1) return;
  for (const std::size_t received : {2, 4}) {
    const auto ranks = make_to_fail();
    std::vector<float> values(5);
    if (ranks.rank() == 0) ranks.send(buffer_of(std::span(values).first(3)), 1, soon());
    if (ranks.rank() == 1) {
      EXPECT_THROW(ranks.recv(buffer_of(std::span(values).first(received)), 0, soon()), InvalidArgument);
    }
    if (ranks.rank() > 1) {
      EXPECT_THROW(ranks.barrier(soon()), Error);  // rank 1 has failed
    }
    group().barrier(soon());
  }
  expect_sum(group());
}

TEST(Mpi, ALateRankIsNamedAndANewGroupWorks) {
  if (group().size() == 1) return;
  constexpr float kOurs = 7;
  const int late = group().size() - 1;
  const auto ranks = make_to_fail();
  const auto key = [](int rank) { return text("rank ", rank, " has given up"); };
  std::vector<float> values(1'000'000);
  if (ranks.rank() == late) {
    std::vector<std::string> keys;
    for (int r = 0; r < late; ++r) keys.push_back(key(r));
    job().store().get(keys, soon());
    EXPECT_THROW(ranks.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon()), DeadlineExceeded);
  } else {
    constexpr double kSeconds = 0.3;
    const auto start = Deadline::Clock::now();
    try {
      ranks.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, after(kSeconds));
      ADD_FAILURE() << "the call returned";
    } catch (const DeadlineExceeded& error) {
      EXPECT_EQ(error.ranks(), std::vector{late}) << error.what();
    }
    EXPECT_LT(std::chrono::duration<double>(Deadline::Clock::now() - start).count(), kSeconds + 2);
    std::fill(values.begin(), values.end(), kOurs);  // the buffer is the caller's again
    job().store().set(key(ranks.rank()), "yes", soon());
  }
  EXPECT_THROW(ranks.barrier(soon()), Error);
  expect_sum(make());
  if (ranks.rank() != late) {
    EXPECT_EQ(values, std::vector<float>(values.size(), kOurs));
  }
}

TEST(Mpi, AnAbortEndsTheCallsOfOtherRanks) {
  if (group().size() == 1) return;
  const auto ranks = make_to_fail();
  if (ranks.rank() == 0) {
    ranks.abort("enough");
  } else {
    EXPECT_THROW(ranks.barrier(soon()), Aborted);
  }
  group().barrier(soon());
}

}  // namespace

// The modes.

// Rank 1 is killed in the middle of a call. The others say whom they lost, and go on in a Group of their own.
int lose_a_rank() {
  constexpr int kVictim = 1;
  const auto ranks = make();
  const bool is_victim = ranks.rank() == kVictim;
  const std::vector<Fault> faults{{.call = 2, .place = "mpi.started", .action = Fault::Action::kill}};
  const auto faulty = with_faults(ranks, is_victim ? faults : std::vector<Fault>());
  std::vector<float> values(100'000);
  try {
    for (int i = 0; i < 3; ++i) faulty.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
    std::cout << "lost nobody" << std::endl;
  } catch (const PeerLost& error) {
    std::cout << text("lost rank ", error.rank(), "\n") << std::flush;
  }
  World world{.rank = ranks.rank() - (ranks.rank() > kVictim ? 1 : 0), .size = ranks.size() - 1, .generation = 1};
  world.host = job().world().host;
  const auto survivors = make_group(world, job().store(), {.backend = "mpi"});
  float sum = 1;
  survivors.all_reduce(buffer_of(std::span(&sum, 1)), ReduceOp::sum, soon());
  std::cout << text("survivors ", sum, "\n") << std::flush;
  return 0;
}

// Two ranks in each process, as threads.
int run_threads() {
  std::vector<std::string> errors(2);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        try {
          const World world{.rank = 2 * job().rank() + i, .size = 2 * job().size()};
          make_group(world, job().store(), {.backend = "mpi"});
        } catch (const InvalidArgument& error) {
          errors[static_cast<std::size_t>(i)] = error.what();
        }
      });
    }
  }
  for (const auto& error : errors) std::cout << "threads: " << error << std::endl;
  return 0;
}

// The program has MPI begin and end by itself, at the level of threads that it names.
int begin_by_itself(bool multiple) {
  const auto& mpi = mpi::library();
  int provided = 0;
  mpi.MPI_Init_thread(nullptr, nullptr, multiple ? mpi.constants.thread_multiple : 0, &provided);
  {
    const auto ranks = make();
    float sum = 1;
    ranks.all_reduce(buffer_of(std::span(&sum, 1)), ReduceOp::sum, soon());
    std::cout << text("sum ", sum, "\n") << std::flush;
  }
  return mpi.MPI_Finalize();
}

// Prints failures alone, with the rank.
class FailuresOfARank final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.passed()) return;
    std::cout << text("rank ", job().rank(), ": ", result.file_name() == nullptr ? "" : result.file_name(), ":",
                      result.line_number(), ": ", result.message(), "\n")
              << std::flush;
  }
};

int run_mode(const std::string& mode) {
  if (mode == "lose") return lose_a_rank();
  if (mode == "threads") return run_threads();
  if (mode == "own") return begin_by_itself(true);
  if (mode == "own_single") return begin_by_itself(false);
  make().barrier(soon());
  std::cout << "made" << std::endl;
  return 0;
}

}  // namespace lockstep::collective

// mpi_ranks                         the tests
// mpi_ranks --mode MODE             lose, threads, own, own_single, or make: only makes the Group
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    if (argc == 3) return lockstep::collective::run_mode(argv[2]);
    if (lockstep::collective::job().rank() != 0) {
      auto& listeners = testing::UnitTest::GetInstance()->listeners();
      delete listeners.Release(listeners.default_result_printer());
      listeners.Append(new lockstep::collective::FailuresOfARank);
    }
    return RUN_ALL_TESTS();
  } catch (const std::exception& error) {
    std::cout << lockstep::text("error: ", error.what(), "\n") << std::flush;
    return 1;
  }
}
