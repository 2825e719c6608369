#include "base/process.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace lockstep {
namespace {

TEST(ThreadStacks, NameEachThreadAndWhereItIs) {
  std::mutex mutex;
  std::condition_variable_any changed;
  std::jthread waits([&](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "waiting");
    std::unique_lock lock(mutex);
    changed.wait(lock, stop, [] { return false; });
  });
  std::string stacks;
  while (stacks.find("(waiting)") == std::string::npos) stacks = stacks_of_all_threads();
  EXPECT_NE(stacks.find("pthread_cond_wait"), std::string::npos) << stacks;
  EXPECT_NE(stacks.find("thread " + std::to_string(getpid())), std::string::npos) << stacks;
}

TEST(ThreadStacks, DoNotWaitForAThreadThatBlocksSignals) {
  std::mutex mutex;
  std::condition_variable_any changed;
  std::jthread deaf([&](const std::stop_token& stop) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "deaf");
    std::unique_lock lock(mutex);
    changed.wait(lock, stop, [] { return false; });
  });
  std::string stacks;
  while (stacks.find("(deaf)\n  does not answer") == std::string::npos) stacks = stacks_of_all_threads();
  EXPECT_NE(stacks.find("__libc_start_main"), std::string::npos) << stacks;  // the others do
}

}  // namespace
}  // namespace lockstep
