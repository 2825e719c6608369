#include "train/signal_guard.h"

#include <gtest/gtest.h>

namespace lockstep::train {
namespace {

void (*handler_of(int signal))(int) {
  struct sigaction action {};
  sigaction(signal, nullptr, &action);
  return action.sa_handler;
}

TEST(SignalGuard, NotesASignalAndPutsTheHandlerBack) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto before = handler_of(signal);
    {
      const SignalGuard guard(true);
      EXPECT_EQ(guard.received(), 0);
      raise(signal);
      EXPECT_EQ(guard.received(), signal);
    }
    EXPECT_EQ(handler_of(signal), before);
  }
}

TEST(SignalGuard, ASignalThatIsIgnoredStaysSo) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto before = ::signal(signal, SIG_IGN);  // as nohup, or a shell's "&", leaves it
    {
      const SignalGuard guard(true);
      raise(signal);
      EXPECT_EQ(guard.received(), 0);
      EXPECT_EQ(handler_of(signal), SIG_IGN);
    }
    EXPECT_EQ(handler_of(signal), SIG_IGN);
    ::signal(signal, before);
  }
}

}  // namespace
}  // namespace lockstep::train
