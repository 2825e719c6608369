#include "train/signal_guard.h"

#include <atomic>

namespace lockstep::train {
namespace {

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);  // a signal handler may touch it

void note(int signal) { noted.store(signal); }

// A signal that the program ignores, or that it inherited as ignored (nohup, a shell's "&"), stays ignored.
void take(int signal, const struct sigaction& ours, struct sigaction& before) {
  sigaction(signal, nullptr, &before);
  const bool is_ignored = (before.sa_flags & SA_SIGINFO) == 0 && before.sa_handler == SIG_IGN;
  if (!is_ignored) sigaction(signal, &ours, nullptr);
}

}  // namespace

SignalGuard::SignalGuard(bool active) : active_(active) {
  if (!active_) return;
  noted.store(0);
  struct sigaction action {};
  action.sa_handler = &note;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);  // a second one ends the program
  take(SIGINT, action, before_interrupt_);
  take(SIGTERM, action, before_terminate_);
}

SignalGuard::~SignalGuard() {
  if (!active_) return;
  sigaction(SIGINT, &before_interrupt_, nullptr);
  sigaction(SIGTERM, &before_terminate_, nullptr);
}

thread_local int SignalGuard::of_thread = 0;

int SignalGuard::received() const { return active_ ? noted.load() : of_thread; }

}  // namespace lockstep::train
