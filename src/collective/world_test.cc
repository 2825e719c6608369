// Making groups, and what is said when it cannot be done.
#include "base/expect_says_testing.h"
#include "lockstep/collective/make_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>

#include "cluster/store_server.h"
#include "collective/ranks_testing.h"
#include "lockstep/collective/group_wrappers.h"
#include "transport/connections.h"
#include "transport/socket.h"

namespace lockstep::collective {
namespace {

TEST(Store, KeepsWhatIsSetAndWaitsForWhatIsNot) {
  const auto store = Store::hold("127.0.0.1:0");
  const auto other = Store::connect(store.address(), soon());
  other.set("a", std::string("x\0y", 3), soon());
  EXPECT_EQ(store.get("a", soon()), std::string("x\0y", 3));
  EXPECT_EQ(store.add("n", 2, soon()) + other.add("n", 3, soon()), 7);
  std::jthread later([&] { other.set("late", "here", soon()); });
  EXPECT_EQ(store.get("late", soon()), "here");
  EXPECT_THROW(store.set("k", std::string(2 << 20, 'v'), soon()), InvalidArgument);
}

TEST(Store, CallsThatWaitDoNotHoldUpOthers) {
  const auto store = Store::hold("127.0.0.1:0");
  std::jthread waits([&] { EXPECT_EQ(store.get("late", soon()), "here"); });
  EXPECT_THROW(store.get("never", Deadline::after(std::chrono::milliseconds(20))), DeadlineExceeded);
  store.set("late", "here", Deadline::after(std::chrono::seconds(5)));
}

TEST(Store, OneOfManyTakesAPlace) {
  const auto store = Store::hold("127.0.0.1:0");
  EXPECT_EQ(store.compare_set("place", "", "mine", soon()), "mine");
  EXPECT_EQ(store.compare_set("place", "", "yours", soon()), "mine");
  EXPECT_EQ(store.compare_set("place", "mine", "yours", soon()), "yours");
  EXPECT_EQ(store.get("place", soon()), "yours");
}

TEST(Store, WaitersFailAtOnce) {
  const auto store = Store::hold("127.0.0.1:0");
  store.set("a/there", "here", soon());
  std::jthread waits(
      [&] { expect_says(message_of<ClusterError>([&] { store.get("a/never", soon()); }), "the first reason"); });
  store.fail_waiters("a/", "the first reason", soon());
  waits.join();
  store.fail_waiters("a/", "another", soon());
  expect_says(message_of<ClusterError>([&] { store.get("a/later", soon()); }), "the first reason");
  EXPECT_EQ(store.get("a/there", soon()), "here");
  EXPECT_THROW(store.get("b", Deadline::after(std::chrono::milliseconds(20))), DeadlineExceeded);
  store.set("b/rank 11", "here", soon());
  store.fail_waiters("", "that rank ended", soon(), "/rank 1");
  expect_says(message_of<ClusterError>([&] { store.get("b/rank 1", soon()); }), "that rank ended");
  EXPECT_EQ(store.get("b/rank 11", soon()), "here");
}

TEST(Store, AnswersUntilTheOthersHaveLetGo) {
  for (int round = 0; round < 100; ++round) {  // the end comes before the question in most of them
    std::optional<Store> held = Store::hold("127.0.0.1:0");
    held->set("why", "because", soon());
    std::optional<Store> other = Store::connect(held->address(), soon());
    std::promise<void> begun;
    std::jthread ends([&] {
      begun.set_value();
      held.reset();
    });
    begun.get_future().wait();
    EXPECT_EQ(other->get("why", soon()), "because");
    other.reset();
  }
}

TEST(Store, OnlyNumbersThatFitAreAdded) {
  const auto store = Store::hold("127.0.0.1:0");
  store.set("word", "seven", soon());
  expect_says(message_of<ClusterError>([&] { store.add("word", 1, soon()); }), "no number");
  store.add("much", std::numeric_limits<std::int64_t>::max(), soon());
  expect_says(message_of<ClusterError>([&] { store.add("much", 1, soon()); }), "does not fit");
  EXPECT_EQ(store.add("much", -1, soon()), std::numeric_limits<std::int64_t>::max() - 1);
}

TEST(Store, SaysWhichKeysNeverCame) {
  const auto store = Store::hold("127.0.0.1:0");
  store.set("b", "", soon());
  const auto message = message_of<DeadlineExceeded>([&] {
    store.get(std::vector<std::string>{"a", "b", "c"}, Deadline::after(std::chrono::milliseconds(50)));
  });
  expect_says(message, "missing in " + store.address() + ": a, c");
  EXPECT_EQ(store.get("b", soon()), "");  // and goes on
}

TEST(Store, BadAddressesAndStrangersAreNamed) {
  EXPECT_THROW(Store::hold("127.0.0.1"), ClusterError);
  expect_says(message_of<ClusterError>([] { Store::hold("192.0.2.1:1", {.trusted_network = true}); }),
              "cannot listen at 192.0.2.1:1");
  const auto store = Store::hold("127.0.0.1:0");
  EXPECT_THROW(Store::hold(store.address()), ClusterError);  // in use
  expect_says(message_of<DeadlineExceeded>(
                  [] { Store::connect("127.0.0.1:9", Deadline::after(std::chrono::milliseconds(50))); }),
              "connecting to 127.0.0.1:9");

  // Bytes that are not ours are turned away, and the store goes on.
  const auto stranger = transport::connect_to(store.address(), soon());
  transport::write_value(stranger, std::array<char, 96>{"GET / HTTP/1.1\r\n"}, soon());
  EXPECT_THROW(transport::read_value<char>(stranger, soon()), ClusterError);  // closed
  store.set("still", "here", soon());

  // The server that answers is no store.
  const auto listener = transport::listen_at("127.0.0.1:0", {});
  std::jthread server([&] {
    transport::write_value(transport::accept_from(listener, soon()), std::array<char, 96>{"SSH-2.0"}, soon());
  });
  expect_says(message_of<ClusterError>([&] { Store::connect(transport::local_address(listener), soon()); }),
              "it does not speak Lockstep's protocol");
}

TEST(Store, IsForThoseWithItsToken) {
  const Access ours{.token = std::string(32, 'o')}, others{.token = std::string(32, 'p')};
  const auto store = Store::hold("127.0.0.1:0", ours);
  Store::connect(store.address(), soon(), ours).set("a", "1", soon());
  for (const auto& access : {others, Access{}}) {
    expect_says(message_of<ClusterError>([&] { Store::connect(store.address(), soon(), access); }),
                "the store at " + store.address() + ": it cannot prove that it belongs to this job");
  }
  // One that knows no token, and does not look at the store's proof, has its question left unanswered.
  const auto stranger = transport::connect_to(store.address(), soon());
  transport::write_value(stranger, transport::fresh(cluster::store_greeting()), soon());
  transport::write_value(stranger, transport::other_end_of(stranger), soon());
  transport::write_value(stranger, transport::Proof{}, soon());
  transport::read_value<std::array<char, sizeof(transport::Greeting) + sizeof(transport::Proof)>>(stranger, soon());
  EXPECT_THROW(transport::read_value<char>(stranger, soon()), ClusterError);  // closed
  EXPECT_EQ(store.get("a", soon()), "1");
}

TEST(Store, AnotherVersionIsTurnedAwayWithBothNumbers) {
  const auto store = Store::hold("127.0.0.1:0");
  const auto old = transport::connect_to(store.address(), soon());
  transport::write_value(old, transport::Greeting{.version = 77}, soon());
  EXPECT_EQ(transport::read_value<transport::Greeting>(old, soon()).version, 4u);  // the other end can tell by it
  transport::read_value<transport::Proof>(old, soon());
  EXPECT_THROW(transport::read_value<char>(old, soon()), ClusterError);  // closed
}

class AnyBackend : public testing::TestWithParam<std::string> {
 protected:
  int ranks_per_host() const { return GetParam() == "hierarchical" ? 2 : 1 << 20; }
  GroupOptions options() const { return {.backend = GetParam(), .timeout_seconds = 20, .heap_bytes = 16 << 20}; }
};

TEST_P(AnyBackend, AMemberThatNeverComesIsNamed) {
  auto in_vain = options();
  in_vain.timeout_seconds = 0.3;
  std::vector<std::string> messages(4);
  const auto store = Store::hold("127.0.0.1:0");
  {
    std::vector<std::jthread> threads;
    for (const int rank : {0, 2, 3}) {
      threads.emplace_back([&, rank] {
        messages[static_cast<std::size_t>(rank)] = message_of<DeadlineExceeded>(
            [&] { make_group({.rank = rank, .size = 4}, Store::connect(store.address(), soon()), in_vain); });
      });
    }
  }
  for (const int rank : {0, 2, 3})
    expect_says(messages[static_cast<std::size_t>(rank)], "making a group: gave up after 0.3");
  for (const int rank : {0, 2, 3}) expect_says(messages[static_cast<std::size_t>(rank)], "rank 1 has not come");
}

// Returns the errors of making a group with each world; all have one store.
std::vector<std::string> errors_of(const std::vector<World>& worlds, const std::vector<GroupOptions>& options) {
  std::vector<std::string> errors(worlds.size());
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    threads.emplace_back([&, i] {
      errors[i] = message_of<Error>(
          [&] { make_group(worlds[i], Store::connect(store.address(), soon()), options[i % options.size()]); });
    });
  }
  threads.clear();
  return errors;
}

TEST_P(AnyBackend, RanksThatDisagreeAboutTheirNumberAllHearOfIt) {
  const auto errors = errors_of({{.rank = 0, .size = 3}, {.rank = 1, .size = 3}, {.rank = 2, .size = 4}}, {options()});
  for (const auto& error : errors) expect_says(error, "ranks; those who came before say ");
}

TEST_P(AnyBackend, AnotherGenerationIsNamed) {
  auto in_vain = options();
  in_vain.timeout_seconds = 0.3;
  const auto errors = errors_of({{.rank = 0, .size = 2}, {.rank = 1, .size = 2, .generation = 7}}, {in_vain});
  expect_says(errors[0], "rank 1 has not come; rank 1 is of generation 7, this rank of 0");
  expect_says(errors[1], "rank 0 has not come; rank 0 is of generation 0, this rank of 7");
}

TEST_P(AnyBackend, OptionsThatDifferAreNamed) {
  auto other = options();
  other.bytes_per_pack = 77;
  const auto errors = errors_of({{.rank = 0, .size = 2}, {.rank = 1, .size = 2}}, {options(), other});
  for (const auto& error : errors)
    expect_says(error, "rank 0 has bytes_per_pack 1048576, rank 1 has bytes_per_pack 77");
}

TEST_P(AnyBackend, RanksThatDifferAreNamed) {
  const auto errors =
      run_ranks({.size = 3, .group = options(), .ranks_per_host = ranks_per_host()}, [](const Group& group) {
        std::vector<float> values(group.rank() == 1 ? 5 : 4);
        const auto checked = GetParam() == "shm" ? with_checks(group) : group;  // else it is from the start
        const auto message = message_of<InvalidArgument>(
            [&] { checked.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon()); });
        expect_says(message,
                    "rank 1 calls all_reduce of 5 x float32, sum, the others call all_reduce of 4 x float32, sum");
        checked.barrier(soon());  // nothing was sent, so the group goes on
      });
  expect_no_errors(errors);
}

TEST_P(AnyBackend, WithoutChecksTooNoRankGetsAWrongResult) {
  auto unchecked = options();
  unchecked.checked_calls = 0;
  const auto errors = run_ranks({.size = 2, .group = unchecked}, [](const Group& group) {
    std::vector<double> values(group.rank() == 1 ? 5000 : 4000);
    EXPECT_THROW(group.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon()), Error);
  });
  expect_no_errors(errors);
}

TEST_P(AnyBackend, BadArgumentsAreNamed) {
  const auto errors = run_ranks({.size = 2, .group = options()}, [](const Group& group) {
    std::vector<float> four(4), five(5);
    const auto says = [&](const Call& call, const std::string& part) {
      expect_says(message_of<InvalidArgument>([&] { group.run(call, soon()); }), part);
    };
    const auto buffer = buffer_of(std::span(four)), other = buffer_of(std::span(five));
    says(Call::broadcast(buffer, 2), "root is 2; the group has ranks 0 to 1");
    says(Call::send(buffer, -1), "the other rank is -1");
    says(Call::send(buffer, group.rank()), "names itself");
    says(Call::all_gather(buffer, other), "the output is 5 x float32; it must have 8 elements");
    says(Call::reduce_scatter(other, buffer, ReduceOp::sum), "the input is 5 x float32; it must have 8 elements");
    says(Call::all_to_all(other, other), "must have 4 elements");
    says(Call::all_gather(buffer, other, {1, 2, 3}), "there are 3 counts; the group has 2 ranks");
    says(Call::all_reduce({nullptr, 3, DType::float32}, ReduceOp::sum), "has no data");
    says(Call::all_reduce({four.data(), 1, static_cast<DType>(77)}, ReduceOp::sum), "DType 77 does not exist");
    group.barrier(soon());
  });
  expect_no_errors(errors);
}

TEST_P(AnyBackend, ATimelineHasATrackARankStrictlyNested) {
  const std::string path = testing::TempDir() + "/timeline_" + GetParam() + ".json";
  const auto errors =
      run_ranks({.size = 3, .group = options(), .ranks_per_host = ranks_per_host()}, [&](const Group& group) {
        Timeline timeline;
        const auto recorded = with_timeline(group, timeline, soon());
        std::vector<float> values(1000);
        for (int i = 0; i < 5; ++i) recorded.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, soon());
        auto named = Call::broadcast(buffer_of(std::span(values)), 1);
        named.tensors = std::make_shared<std::string>("w\xe9ights");  // no UTF-8
        recorded.start(named, soon()).wait();
        timeline.write(path, recorded, soon());
      });
  expect_no_errors(errors);
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  std::map<int, double> end;
  std::map<int, int> slices;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const int track = event["tid"];
    EXPECT_GE(event["ts"].get<double>(), end[track]);
    end[track] = event["ts"].get<double>() + event["dur"].get<double>();
    EXPECT_GE(event["args"]["queued_us"].get<double>(), 0);
    if (event["name"] == "all_reduce") {
      EXPECT_EQ(event["args"]["bytes"], 4000);
    }
    ++slices[track];
  }
  EXPECT_EQ(slices, (std::map<int, int>{{0, 6}, {1, 6}, {2, 6}}));
}

TEST_P(AnyBackend, BoolsAreReducedByAndAndOr) {
  const auto reduces = [](const Group& group) {
    std::vector<std::uint8_t> own(static_cast<std::size_t>(group.size())), any, all;
    const auto bools = [](auto& values) { return Buffer{values.data(), values.size(), DType::boolean}; };
    own[static_cast<std::size_t>(group.rank())] = 1;
    any = all = own;
    group.all_reduce(bools(any), ReduceOp::max, soon());
    group.all_reduce(bools(all), ReduceOp::min, soon());
    EXPECT_EQ(any, std::vector<std::uint8_t>(own.size(), 1));
    EXPECT_EQ(all, std::vector<std::uint8_t>(own.size(), 0));
    expect_says(message_of<InvalidArgument>([&] { group.all_reduce(bools(own), ReduceOp::sum, soon()); }),
                "not by sum");
  };
  expect_no_errors(run_ranks({.size = 3, .group = options(), .ranks_per_host = ranks_per_host()}, reduces));
}

INSTANTIATE_TEST_SUITE_P(Backends, AnyBackend, testing::ValuesIn(backends()));

TEST(World, BadWorldsAndBackendsAreNamed) {
  const auto store = Store::hold("127.0.0.1:0");
  expect_says(message_of<InvalidArgument>([&] { make_group({.rank = 2, .size = 2}, store); }), "rank 2 of 2");
  expect_says(message_of<InvalidArgument>([&] { make_group({}, store, {.backend = "gloo"}); }),
              "there is no backend \"gloo\"");
  expect_says(message_of<InvalidArgument>([&] { make_group({}, store, {.network = "infiniband"}); }),
              "there is no network \"infiniband\"; there are tcp and ucx");
  expect_says(message_of<InvalidArgument>([&] { make_group({}, store, {.timeout_seconds = -1}); }),
              "timeout_seconds is -1");
  for (const auto* address : {"192.0.2.1", "nowhere.invalid", "127.0.0.1:80", ""}) {
    expect_says(message_of<InvalidArgument>([&] { make_group({.address = address}, store); }),
                "World: rank 0's address: ");
  }
  EXPECT_THROW(implementation_named("circle"), InvalidArgument);
  EXPECT_EQ(make_group({}, store).backend(), "shm");
}

TEST(Connections, StrangersAndOtherVersionsDoNotKeepMembersApart) {
  // Rank 1 learns where rank 0 listens; strangers are there before it.
  std::promise<std::string> address_of_zero;
  const auto address = address_of_zero.get_future().share();
  std::vector<transport::Sockets> zero;
  std::jthread first([&] {
    zero = transport::connect_all(
        {.rank = 0, .size = 2}, 2,
        [&](const std::string& mine) {
          address_of_zero.set_value(mine);
          return std::vector<std::string>{mine, ""};
        },
        soon());
  });
  std::vector<FileDescriptor> strangers;
  const auto one = transport::connect_all(
      {.rank = 1, .size = 2}, 2,
      [&](const std::string& mine) {
        const auto where = address.get().substr(address.get().find(' ') + 1);
        for (const std::string greeting : {"GET / HTTP/1.1", "LCKS\x63\1\1\1", ""}) {
          strangers.push_back(transport::connect_to(where, soon()));
          std::array<char, sizeof(transport::Greeting)> bytes{};
          std::copy(greeting.begin(), greeting.end(), bytes.begin());
          if (!greeting.empty()) transport::write_value(strangers.back(), bytes, soon());
        }
        return std::vector<std::string>{address.get(), mine};
      },
      soon());
  first.join();
  EXPECT_TRUE(zero[0][1].open() && zero[1][1].open() && one[0][0].open() && one[1][0].open());
}

TEST(Connections, AnotherVersionIsNamed) {
  const auto listener = transport::listen_at("127.0.0.1:0", {});
  std::jthread other([&] {
    const auto socket = transport::accept_from(listener, soon());
    transport::read_value<transport::Greeting>(socket, soon());
    transport::write_value(socket, transport::Greeting{.version = 99}, soon());
  });
  const auto name = std::string(32, 'x') + " " + transport::local_address(listener);
  expect_says(message_of<ClusterError>([&] {
                transport::connect_all(
                    {.rank = 1, .size = 2}, 1,
                    [&](const std::string& mine) {
                      return std::vector{name, mine};
                    },
                    soon());
              }),
              "it speaks version 99 of the protocol, this process version 4");
}

}  // namespace
}  // namespace lockstep::collective
