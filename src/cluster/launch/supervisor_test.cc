// When an elastic job goes on without processes, and when nobody is left; and the end of a launcher that is alone.
#include "cluster/launch/supervisor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "base/child_process_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "cluster/rendezvous.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

ChildCommand rank_that_runs(int rank, const std::string& script) {
  return {.name = text("rank ", rank),
          .rank = rank,
          .command = {"/bin/sh", "-c", script},
          .environment = {{"LOCKSTEP_RESTART", "0"}}};
}

// An elastic job on this host that has begun. Its store names the processes with which it began; each file in `folder_`
// tells the scripts what has happened.
class GoingOn : public testing::Test, public ChangingHosts {
 protected:
  GoingOn() {
    store_.set(cluster::kJobHasBegun, "yes", soon());
    set_members(3);
  }

  std::vector<ChildCommand> newcomers(const Processes&) override { return {}; }
  bool is_to_leave(const std::string&) const override { return false; }
  void lost(const std::string& name, bool) override { std::ofstream(folder_ / ("lost " + name)) << "yes"; }

  static Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }
  void set_members(int count) {
    std::string members = "1\n";
    for (int rank = 0; rank < count; ++rank) members += text(cluster::kProcess, rank, " store:", rank, " 0 a host\n");
    store_.set(cluster::kMembersNow, members, soon());
  }

  // Returns its exit status; afterwards `failed_`.
  int run(const std::vector<ChildCommand>& members, const ElasticLimits& limits) {
    policy_ = end_elastically(limits, job_store_, this);
    Supervisor job(members, {*policy_, job_store_}, {signals_, reaper_, out_, err_});
    const int status = job.run();
    failed_ = job.failed();
    return status;
  }
  std::optional<int> restarts_when_nobody_is_left() const { return policy_->restarts_before_new_start(); }

  std::string until(const std::string& file) const {
    return text("until [ -e '", (folder_ / file).string(), "' ]; do sleep 0.01; done; ");
  }
  std::string tell(const std::string& file) const { return text(": > '", (folder_ / file).string(), "'; "); }

  // Its first life ends when `after` has happened; the next one tells that it is there.
  std::string started_again(const std::string& after, const std::string& then) const {
    return text("if [ -z \"$LOCKSTEP_JOIN\" ]; then ", after, "kill -9 $$; fi; ", tell("joined"), then);
  }

  const std::filesystem::path folder_ =
      fresh_folder("going_on", testing::UnitTest::GetInstance()->current_test_info()->name());
  const Signals signals_;
  const Reaper reaper_;
  std::ostringstream out_, err_;
  const Store store_ = Store::hold("127.0.0.1:0");
  JobStore job_store_{store_, store_};
  std::unique_ptr<EndPolicy> policy_;
  bool failed_ = false;
};

TEST_F(GoingOn, ANewcomerThatTheStoreDoesNotNameYetMayHaveBeenTakenIn) {
  EXPECT_EQ(run({rank_that_runs(0, until("joined") + "kill -9 $$"),
                 rank_that_runs(1, started_again("", until("lost rank 0") + "exit 0"))},
                {.restarts = 1, .fewest = 1}),
            0)
      << err_.str();
  EXPECT_FALSE(restarts_when_nobody_is_left() || failed_) << err_.str();
}

// It says so itself, and the restart that it cost is given back; the others are fewer than the job needs by then.
TEST_F(GoingOn, NobodyIsLeftWhereTheLastNewcomerFindsNobody) {
  store_.set(cluster::key_of_refusal("2", "1"), cluster::kNobodyIsLeft, soon());
  EXPECT_EQ(
      run({rank_that_runs(0, until("lost rank 1") + "kill -9 $$"), rank_that_runs(1, until("joined") + "kill -9 $$"),
           rank_that_runs(2, started_again("", until("lost rank 0") + "exit 1"))},
          {.restarts = 1, .fewest = 2}),
      1)
      << err_.str();
  EXPECT_EQ(restarts_when_nobody_is_left(), 0) << err_.str();
}

TEST_F(GoingOn, AProcessThatTheMembersLeftOutIsNobody) {
  set_members(1);
  EXPECT_EQ(
      run({rank_that_runs(0, until("other") + "kill -9 $$"), rank_that_runs(1, tell("other") + "exec sleep 1000")},
          {.restarts = 0, .fewest = 1}),
      128 + SIGKILL)
      << err_.str();
  EXPECT_TRUE(restarts_when_nobody_is_left()) << err_.str();
}

TEST_F(GoingOn, NobodyIsLeftWhereTheLastProcessIsLostAlone) {
  EXPECT_EQ(run({rank_that_runs(0, "kill -9 $$")}, {.restarts = 1, .fewest = 1}), 128 + SIGKILL) << err_.str();
  EXPECT_EQ(restarts_when_nobody_is_left(), 0) << err_.str();
}

// Another launcher is told that none is left.
TEST_F(GoingOn, WhereOneCannotBeStartedNoneIsLeft) {
  const auto file = folder_ / "process";
  std::vector<ChildCommand> ranks{rank_that_runs(0, text("echo $$ > ", file.string(), "; exec sleep 1000")),
                                  rank_that_runs(1, "")};
  ranks[1].command = {"/nowhere/program"};
  const auto policy = std::make_unique<EndPolicy>();
  EXPECT_THROW(Supervisor(ranks, {*policy, job_store_}, {signals_, reaper_, out_, err_}), ClusterError);
  for (const auto a_while = Deadline::after(std::chrono::milliseconds(200)); !a_while.passed(); usleep(1000)) {
  }
  pid_t process = 0;  // where it had the time to say so
  std::ifstream(file) >> process;
  EXPECT_TRUE(process == 0 || kill(process, 0) != 0) << "it still runs";
}

// Another launcher's messages come by standard input. Returns what `act` does in a process that has this one.
template <class Act>
std::string with_launcher(const std::string& said, bool goes_on, const Act& act) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "no pipe";
  ChildProcess process([&]() -> std::string {
    dup2(ends[0], STDIN_FILENO);
    close(ends[1]);
    OtherLauncher launcher;
    return act(launcher);
  });
  close(ends[0]);
  const auto written = write(ends[1], said.data(), said.size());
  if (!goes_on) close(ends[1]);
  auto answer = written == static_cast<ssize_t>(said.size()) ? process.said() : "nothing was written";
  if (goes_on) close(ends[1]);
  return answer;
}

// The launcher may have started the job again by then, beside processes that are left here.
TEST(ALauncher, ThatHearsNothingOfTheOneThatStartedItKillsItsRanks) {
  for (const bool connected : {true, false}) {
    SCOPED_TRACE(connected);
    const auto file = fresh_folder("going_on", text("silence_", connected)) / "process";
    const auto answer = with_launcher("alive\n", connected, [&](OtherLauncher& launcher) {
      const Signals signals;
      const Reaper reaper;
      std::ostringstream out, err;
      launcher.set_patience({.silence_seconds = connected ? 0.2 : kLongSilenceSeconds});
      JobStore store("", {}, std::nullopt);
      const auto policy = std::make_unique<EndPolicy>();
      Supervisor job({rank_that_runs(0, text("echo $$ > ", file.string(), ".new; mv ", file.string(), ".new ",
                                             file.string(), "; exec sleep 1000"))},
                     {*policy, store, 0, &launcher}, {signals, reaper, out, err});
      while (!std::filesystem::exists(file)) usleep(1000);
      const int status = job.run();
      return text(status, " ", err.str());
    });
    EXPECT_EQ(answer.find("137 "), 0U) << answer;
    EXPECT_EQ(answer.find("has been silent for 0.2 s") != std::string::npos, connected) << answer;
    pid_t process = 0;
    std::ifstream(file) >> process;
    EXPECT_GT(process, 0);
    EXPECT_NE(kill(process, 0), 0) << "it still runs";
  }
}

TEST(ALauncher, HearsTheMessagesOfTheOneThatStartedIt) {
  const auto kinds = with_launcher("alive\nsignal 15\nsignal 0\nleave\nend\n", true, [](OtherLauncher& launcher) {
    std::string heard;
    const auto deadline = Deadline::after(std::chrono::seconds(20));
    while (!heard.ends_with("end ") && !deadline.passed()) {
      const auto message = launcher.next();
      using Kind = OtherLauncher::Message::Kind;
      if (message.kind == Kind::signal) heard += text("signal ", message.signal, " ");
      if (message.kind == Kind::leave) heard += launcher.ranks_are_to_end() ? "leave " : "leave early ";
      if (message.kind == Kind::end) heard += "end ";
    }
    return heard;
  });
  EXPECT_EQ(kinds, "signal 15 leave end ");
}

TEST(ALauncher, StartsNoRanksBeforeTheOneThatStartedItKnows) {
  const auto waits = [](OtherLauncher& launcher) {
    const bool begins = launcher.wait_for_begin(Deadline::after(std::chrono::seconds(20)));
    return std::string(begins ? "begins" : "the job has ended");
  };
  EXPECT_EQ(with_launcher("alive\nbegin\n", true, waits), "begins");
  EXPECT_EQ(with_launcher("alive\nsignal 15\n", true, waits), "the job has ended");
  EXPECT_NE(with_launcher("alive\n", false, waits), "begins");
}

}  // namespace
}  // namespace lockstep::launch
