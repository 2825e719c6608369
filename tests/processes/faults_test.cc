// Tests what ranks of a Group, which are processes, see when one is killed or stopped at every phase of an operation,
// on every backend.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>

#include "base/text.h"
#include "collective/ranks_testing.h"
#include "lockstep/cluster/store.h"
#include "tests/processes/processes.h"

namespace lockstep {
namespace {

struct Scenario {
  std::string backend = "shm";
  int size = 3;
  std::string action = "kill";
  std::string place;
  int call = 3;
  int victim = 1;
  double deadline = 5;
  std::string buffers = "shared";
  unsigned seed = 0;
};

Process start(const Scenario& scenario, const Store& store, int rank) {
  return Process({LOCKSTEP_GROUP_RANK, text("--rank=", rank), text("--size=", scenario.size),
                  text("--host=host ", scenario.backend == "hierarchical" ? rank / 2 : 0), "--store=" + store.address(),
                  "--backend=" + scenario.backend, text("--deadline=", scenario.deadline),
                  text("--victim=", scenario.victim), text("--call=", scenario.call),
                  "--place=" + (scenario.place.empty() ? "begin" : scenario.place), "--action=" + scenario.action,
                  "--seconds=0.05", "--buffers=" + scenario.buffers, text("--seed=", scenario.seed)});
}

std::vector<Process> start(const Scenario& scenario, const Store& store) {
  std::vector<Process> ranks;
  for (int rank = 0; rank < scenario.size; ++rank) ranks.push_back(start(scenario, store, rank));
  return ranks;
}

double seconds_in(const std::string& output) {
  const auto at = output.find(" after ");
  return at == std::string::npos ? -1 : std::stod(output.substr(at + 7));
}

std::string words(const Scenario& s) {
  return text(s.backend, " ", s.buffers, ", ", s.size, " ranks, ", s.action, " rank ", s.victim, " in call ", s.call,
              " at \"", s.place, "\", seed ", s.seed);
}

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path());
  return names;
}

// Every survivor names the victim, in time, and they go on without it; nothing is left.
void expect_survivors_name_the_victim(const Scenario& scenario) {
  SCOPED_TRACE(words(scenario));
  const auto store = Store::hold("127.0.0.1:0");
  const auto before = shared_files();
  auto ranks = start(scenario, store);
  const bool stops = scenario.action == "stop";
  for (int rank = 0; rank < scenario.size; ++rank) {
    if (rank == scenario.victim) continue;
    auto& process = ranks[static_cast<std::size_t>(rank)];
    try {
      const auto& output = process.wait_for_end(40);
      SCOPED_TRACE(text("rank ", rank, " printed:\n", output));
      const auto expected = text("threw ", stops ? "DeadlineExceeded " : "PeerLost ", scenario.victim, " after ");
      EXPECT_NE(output.find(expected), std::string::npos);
      EXPECT_LT(seconds_in(output), stops ? scenario.deadline + 1.5 : 2);
      EXPECT_NE(output.find("again right"), std::string::npos);
      EXPECT_NE(output.find("left 0 descriptors and 0 threads"), std::string::npos);
      EXPECT_EQ(process.status(), 0);
    } catch (const std::runtime_error& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  }
  if (stops) {  // and the victim, when it goes on, hears that it was given up
    auto& victim = ranks[static_cast<std::size_t>(scenario.victim)];
    victim.send(SIGCONT);
    victim.wait_for_line("threw ", 20);
    EXPECT_EQ(victim.text().find("threw nothing"), std::string::npos) << victim.text();
  }
  EXPECT_EQ(shared_files(), before);
}

const std::vector<std::string> kInMemory{"",
                                         "direct.before_descriptor",
                                         "direct.descriptor_written",
                                         "direct.descriptors_read",
                                         "direct.before_synchronize",
                                         "direct.synchronized"};
const std::vector<std::string> kAtSockets{"", "tcp.before_exchange", "tcp.in_exchange"};
const std::vector<std::string> kInUcx{"", "ucx.before_exchange", "ucx.in_exchange"};

std::vector<std::string> places(const std::string& backend) {
  auto all = backend == "tcp" ? kAtSockets : backend == "ucx" ? kInUcx : kInMemory;
  if (backend == "hierarchical") all.insert(all.end(), kAtSockets.begin() + 1, kAtSockets.end());
  return all;
}

class Faults : public testing::TestWithParam<std::string> {};

TEST_P(Faults, AKilledRankIsNamedBySurvivorsWhoGoOn) {
  for (const auto& place : places(GetParam())) {
    for (const std::string buffers : {"shared", "private"}) {
      expect_survivors_name_the_victim(
          {.backend = GetParam(), .size = 4, .place = place, .victim = place.empty() ? 0 : 2, .buffers = buffers});
    }
  }
}

TEST_P(Faults, AStoppedRankIsNamedAtTheDeadline) {
  for (const auto& place : places(GetParam())) {
    expect_survivors_name_the_victim({.backend = GetParam(),
                                      .size = 4,
                                      .action = "stop",
                                      .place = place,
                                      .victim = place.empty() ? 3 : 2,
                                      .deadline = 0.7});
  }
}

TEST_P(Faults, AbortOnOneRankEndsAll) {
  auto scenario = Scenario{.backend = GetParam(), .size = 4, .action = "abort", .deadline = 20};
  const auto store = Store::hold("127.0.0.1:0");
  auto ranks = start(scenario, store);
  for (auto& rank : ranks) {
    const auto& output = rank.wait_for_end(20);
    EXPECT_NE(output.find("a fault was injected"), std::string::npos) << output;
    EXPECT_NE(output.find("threw Aborted"), std::string::npos) << output;
    EXPECT_LT(seconds_in(output), 2) << output;
  }
}

// Random operations, and a random fault at a random place of a random call. Every rank ends, and every survivor of a
// fault that others can see says who is to blame. LOCKSTEP_FAULT_ROUNDS sets how many rounds, LOCKSTEP_FAULT_SEED the
// first seed.
unsigned number_in_environment(const char* name, unsigned otherwise) {
  const char* const wanted = std::getenv(name);
  return wanted == nullptr ? otherwise : static_cast<unsigned>(std::stoi(wanted));
}

TEST_P(Faults, TwoProcessesOfOneRankAreNamedToAll) {
  const Scenario scenario{.backend = GetParam()};
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<Process> ranks;
  for (const int rank : {0, 1, 1}) ranks.push_back(start(scenario, store, rank));
  for (auto& process : ranks) {
    const auto& output = process.wait_for_end(10);
    EXPECT_NE(output.find("World: rank 1 of generation 0 is process"), std::string::npos) << output;
    EXPECT_NE(output.find("was given the same rank"), std::string::npos) << output;
  }
}

TEST(RandomFaults, SeededRounds) {
  const auto first = number_in_environment("LOCKSTEP_FAULT_SEED", 1);
  const auto rounds = number_in_environment("LOCKSTEP_FAULT_ROUNDS", 60);
  for (unsigned seed = first; seed < first + rounds; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](const std::vector<std::string>& from) { return from[random() % from.size()]; };
    Scenario scenario{.backend = pick(collective::backends()),
                      .size = 2 + static_cast<int>(random() % 3),
                      .action = pick({"kill", "kill", "stop", "delay", "abort", "error"})};
    scenario.place = pick(places(scenario.backend));
    scenario.call = static_cast<int>(random() % 20);
    scenario.victim = static_cast<int>(random() % static_cast<unsigned>(scenario.size));
    scenario.deadline = scenario.action == "stop" ? 0.5 : 10;
    scenario.buffers = pick({"shared", "private"});
    scenario.seed = seed;
    SCOPED_TRACE(words(scenario));
    const auto store = Store::hold("127.0.0.1:0");
    auto ranks = start(scenario, store);
    // A call may not come to the place; then nothing goes wrong.
    const bool lasting = scenario.action == "kill" || scenario.action == "stop";
    for (int rank = 0; rank < scenario.size; ++rank) {
      if (lasting && rank == scenario.victim) continue;
      try {
        const auto& output = ranks[static_cast<std::size_t>(rank)].wait_for_end(40);
        const bool whole = output.find("threw nothing") != std::string::npos;
        const bool named =
            !lasting || output.find(text("threw ", scenario.action == "stop" ? "DeadlineExceeded " : "PeerLost ",
                                         scenario.victim)) != std::string::npos;
        EXPECT_TRUE(whole || (named && output.find("wrong result") == std::string::npos))
            << "rank " << rank << ": " << output;
      } catch (const std::runtime_error& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    }
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Faults, testing::ValuesIn(collective::backends()));

}  // namespace
}  // namespace lockstep
