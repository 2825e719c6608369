// Ranks on hosts of their own: what they see when a link goes down.
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "base/text.h"
#include "cluster/launch/launcher_process.h"
#include "lockstep/cluster/store.h"
#include "tests/processes/hosts.h"
#include "tests/processes/processes.h"
#include "transport/network_channels.h"

namespace lockstep {
namespace {

struct Cut {
  std::string name, backend, network;
  int ranks_per_host;
};

std::vector<Cut> cuts() {
  std::vector<Cut> all{{"tcp", "tcp", "tcp", 1}, {"hierarchical", "hierarchical", "tcp", 2}};
  if (transport::ucx_is_built()) {
    all.push_back({"ucx", "ucx", "ucx", 1});
    all.push_back({"hierarchical_ucx", "hierarchical", "ucx", 2});
  }
  return all;
}

// The ranks in "threw DeadlineExceeded 2 3 after 0.7: ...".
std::set<int> blamed_in(const std::string& output) {
  const std::string start = "threw DeadlineExceeded ";
  const auto at = output.find(start);
  if (at == std::string::npos) return {};
  std::istringstream words(output.substr(at + start.size()));
  std::set<int> ranks;
  for (int rank = 0; words >> rank;) ranks.insert(rank);
  return ranks;
}

class Links : public testing::TestWithParam<Cut> {};

// The ranks of each side name ranks of the other, at the deadline.
TEST_P(Links, AHostThatIsCutOffIsNamedAtTheDeadline) {
  constexpr int kHosts = 3, kCutOff = 2;
  const auto& cut = GetParam();
  const int size = kHosts * cut.ranks_per_host;
  const Hosts hosts(kHosts);
  const launch::TokenFile token;
  setenv(kTokenFileVariable, token.path().c_str(), 1);
  setenv(kTrustedNetworkVariable, cut.network == "ucx" ? "1" : "0", 1);
  std::unique_ptr<Store> store;
  hosts.at_switch([&] { store = std::make_unique<Store>(Store::hold(Hosts::switch_address() + ":0")); });
  std::vector<Process> ranks;
  for (int rank = 0; rank < size; ++rank) {
    const int host = rank / cut.ranks_per_host;
    ranks.emplace_back(hosts.command(
        host, {LOCKSTEP_GROUP_RANK, text("--rank=", rank), text("--size=", size), text("--host=host ", host),
               "--address=" + Hosts::address(host), "--store=" + store->address(), "--backend=" + cut.backend,
               "--network=" + cut.network, "--deadline=1", text("--calls=", 1'000'000), "--buffers=private"}));
  }
  for (auto& rank : ranks) rank.wait_for_line("made", 20);
  const auto cut_at = Deadline::after(std::chrono::seconds(0));
  hosts.take_link_down(kCutOff);
  for (int rank = 0; rank < size; ++rank) {
    const auto& output = ranks[static_cast<std::size_t>(rank)].wait_for_line("threw ", 20);
    const bool cut_off = rank / cut.ranks_per_host == kCutOff;
    const auto blamed = blamed_in(output);
    EXPECT_FALSE(blamed.empty()) << "rank " << rank << " printed:\n" << output;
    for (const int other : blamed) {
      EXPECT_NE(other / cut.ranks_per_host == kCutOff, cut_off) << "rank " << rank << " printed:\n" << output;
    }
    EXPECT_NE(output.find(": all_reduce: gave up after "), std::string::npos) << output;
  }
  EXPECT_LT(cut_at.waited().count(), 3);
}

INSTANTIATE_TEST_SUITE_P(Networks, Links, testing::ValuesIn(cuts()), [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lockstep
