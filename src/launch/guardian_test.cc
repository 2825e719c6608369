// Whom the guardian kills, and whom it does not.
#include "launch/guardian.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>

#include "base/child_process.h"
#include "launch/member.h"

namespace lockstep {
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

TEST(Guardian, KillsTheGroupsThatAreLeftAndThoseAlone) {
  const auto watched = waiting_group(), forgotten = waiting_group();
  {
    const Guardian guardian;
    guardian.watch(watched->pid());
    guardian.watch(forgotten->pid());
    guardian.forget(forgotten->pid());
  }
  watched->said();
  EXPECT_TRUE(WIFSIGNALED(watched->status()) && WTERMSIG(watched->status()) == SIGKILL);
  EXPECT_EQ(::waitpid(forgotten->pid(), nullptr, WNOHANG), 0) << "it ended too";
}

// Another process, of anybody, may have the number as soon as the end of the first was waited for.
TEST(Guardian, HearsOfAnEndWhileTheNumberIsStillTaken) {
  Member member({.name = "rank 0", .command = {"/bin/true"}});
  int told = 0;
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (!member.ended() && !deadline.passed()) {
    member.reap([&](pid_t group) {
      ++told;
      EXPECT_EQ(group, member.pid());
      EXPECT_EQ(::kill(group, 0), 0) << "its number is free";
    });
    ::usleep(1000);
  }
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace lockstep
