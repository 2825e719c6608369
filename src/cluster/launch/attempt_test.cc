// Jobs over hosts, whose launchers are scripts: where a connection breaks, and hosts that come or are left out.
#include "cluster/launch/attempt.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "cluster/rendezvous.h"

namespace lockstep::launch {
namespace {

const std::string kA = "a@127.0.0.1", kB = "b@127.0.0.1";
using Names = std::vector<std::string>;

// In place of ssh: keeps what the launcher of the host is to run, and does what the host's script says.
constexpr const char* kSsh = R"(
begin() { say 'is here'; while read -r line && [ "$line" != begin ]; do :; done; }
say() { echo "lockstep part: $1" >&2; }
hold() { cat > /dev/null; }
until_end() { while read -r line && [ "$line" != end ]; do :; done; }
read -r part
echo "$part" > "$folder/new.$1"
mv "$folder/new.$1" "$folder/part.$1"
. "$folder/script.$1"
)";

class OverHosts : public testing::Test {
 protected:
  OverHosts() {
    std::ofstream(folder_ / "ssh") << "folder=" << folder_.string() << kSsh;
    options_.ssh = "sh " + (folder_ / "ssh").string();
    options_.hosts = {{kA, 1}, {kB, 1}};
    options_.command = {"true"};
    options_.grace_seconds = 1;
    options_.restarts = 5;
  }

  void make_elastic() { options_.min_processes = 1; }
  void on_host(const std::string& host, const std::string& script) const {
    std::ofstream(folder_ / ("script." + host)) << script;
  }

  // Runs it, begun, with these ranks as its latest members.
  int run(Attempt& attempt, const std::vector<int>& ranks) {
    const auto soon = Deadline::after(std::chrono::seconds(20));
    attempt.store().set(cluster::kJobHasBegun, "yes", soon);
    std::string members = "1\n";
    for (const int rank : ranks) members += text(cluster::kProcess, rank, " store:", rank, " 0 a host\n");
    attempt.store().set(cluster::kMembersNow, members, soon);
    return attempt.job().run();
  }

  nlohmann::json part_of(const std::string& host) const {
    std::ifstream in(folder_ / ("part." + host));
    return nlohmann::json::parse(in);
  }

  // The names of hosts that the user's program prints.
  HostDiscovery discovery() const {
    std::ofstream(folder_ / "hosts") << kA << "\n" << kB << "\n";
    return {"cat " + (folder_ / "hosts").string(), 1000};
  }
  static Names usable(HostDiscovery& discovery) {
    Names names;
    for (const auto& host : discovery.usable_hosts()) names.push_back(host.name);
    return names;
  }

  const std::filesystem::path folder_ =
      fresh_folder("attempt", testing::UnitTest::GetInstance()->current_test_info()->name());
  LaunchOptions options_;
  const Signals signals_;
  const Reaper reaper_;
  std::ostringstream out_, err_;
  const LauncherProcess self_{signals_, reaper_, out_, err_};
};

// A job that starts again at once would run beside them. ssh's own status is 255, and so may be the program's.
TEST_F(OverHosts, ProcessesMayRunOnWhereAConnectionBreaksWithoutAWordOnTheirEnd) {
  const std::string breaks = "begin; exit 255", never_began = "exit 255", ends = "begin; say 'ended 255'; exit 255";
  for (const auto& [script, expected] : {std::pair(breaks, Names{kA}), {never_began, Names()}, {ends, Names()}}) {
    SCOPED_TRACE(script);
    on_host(kA, script);
    on_host(kB, "say 'is here'; until_end; say 'ended 143'; exit 143");
    Attempt attempt(options_, 0, self_);
    EXPECT_EQ(attempt.job().run(), 255) << err_.str();
    EXPECT_EQ(attempt.hosts_that_may_train(), expected);
  }
}

TEST_F(OverHosts, AnElasticJobIsNotStartedBesideMembersOfAHostThatIsCutOff) {
  make_elastic();
  on_host(kA, "begin; exit 255");
  on_host(kB, "begin; say 'nobody is left'; say 'ended 1'; hold");
  for (const auto& [members, expected] : {std::pair(std::vector{0, 1}, Names{kA}), {std::vector{1}, Names()}}) {
    SCOPED_TRACE(members.size());
    Attempt attempt(options_, 0, self_);
    run(attempt, members);
    EXPECT_TRUE(attempt.policy().restarts_before_new_start()) << err_.str();
    EXPECT_EQ(attempt.hosts_that_may_train(), expected);
  }
}

TEST_F(OverHosts, HostsThatComeAfterTheJobWasStartedAgainKnowThat) {
  make_elastic();
  auto named = discovery();
  options_.hosts = {{kA, 1}};
  on_host(kA, text("begin; until [ -e ", folder_.string(), "/done ]; do sleep 0.01; done; say 'ended 0'; hold"));
  on_host(kB, text("begin; : > ", folder_.string(), "/done; say 'ended 0'; hold"));
  Attempt attempt(options_, 2, self_, &named);
  EXPECT_EQ(run(attempt, {0}), 0) << err_.str();
  for (const auto& host : {kA, kB}) {
    EXPECT_EQ(part_of(host)["restart"], 2) << host;
    EXPECT_EQ(part_of(host)["restarts"], 3) << host;
  }
  EXPECT_EQ(part_of(kB)["first"], 1);
}

TEST_F(OverHosts, AHostThatFailedIsLeftOutAlsoWhenTheJobIsStartedAgain) {
  make_elastic();
  auto named = discovery();
  on_host(kA, "begin; say 'nobody is left'; say 'ended 1'; hold");
  on_host(kB, "begin; exit 255");
  {
    Attempt attempt(options_, 0, self_, &named);
    run(attempt, {0});
    EXPECT_TRUE(attempt.policy().restarts_before_new_start()) << err_.str();
  }
  EXPECT_EQ(usable(named), Names{kA});  // which found nobody, but has not failed
  std::filesystem::remove(folder_ / ("part." + kB));
  options_.hosts = {{kA, 1}};
  on_host(kA, "begin; say 'ended 0'; hold");
  Attempt next(options_, 1, self_, &named);
  EXPECT_EQ(run(next, {0}), 0) << err_.str();
  EXPECT_FALSE(std::filesystem::exists(folder_ / ("part." + kB)));
}

TEST(Blacklists, LeaveAHostOutForTwiceAsLongEachFurtherTime) {
  Blacklist failed(0.001);
  EXPECT_EQ(failed.add("a"), 0.001);
  EXPECT_EQ(failed.add("a"), 0.002);
  EXPECT_EQ(failed.add("b"), 0.001);
  while (failed.has("a")) {
  }
  EXPECT_EQ(failed.add("a"), 0.004);
  EXPECT_FALSE(failed.has("c"));
}

}  // namespace
}  // namespace lockstep::launch
