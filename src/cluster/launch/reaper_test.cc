// Whom the reaper kills, and whom it does not.
#include "cluster/launch/launcher_process.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>

#include "base/child_process_testing.h"
#include "cluster/launch/child.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {
namespace {

// A process in a group of its own that waits for its end.
std::unique_ptr<ChildProcess> waiting_group() {
  auto group = std::make_unique<ChildProcess>([]() -> std::string {
    ::setpgid(0, 0);
    while (true) ::pause();
  });
  ::setpgid(group->pid(), group->pid());
  return group;
}

TEST(Reaper, KillsTheGroupsThatAreLeftAndThoseAlone) {
  const auto watched = waiting_group(), forgotten = waiting_group();
  {
    const Reaper reaper;
    reaper.watch(watched->pid());
    reaper.watch(forgotten->pid());
    reaper.forget(forgotten->pid());
  }
  watched->said();
  EXPECT_TRUE(WIFSIGNALED(watched->status()) && WTERMSIG(watched->status()) == SIGKILL);
  EXPECT_EQ(::waitpid(forgotten->pid(), nullptr, WNOHANG), 0) << "it ended too";
}

// Another process, of anybody, may have the number as soon as the end of the first was waited for.
TEST(Reaper, HearsOfAnEndWhileTheNumberIsStillTaken) {
  Child child({.name = "rank 0", .command = {"/bin/true"}});
  int told = 0;
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (!child.ended() && !deadline.passed()) {
    child.reap([&](pid_t group) {
      ++told;
      EXPECT_EQ(group, child.pid());
      EXPECT_EQ(::kill(group, 0), 0) << "its number is free";
    });
    ::usleep(1000);
  }
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace lockstep::launch
