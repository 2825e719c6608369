#include "train/signal_guard.h"

#include <atomic>

namespace lockstep::train {
namespace {

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);  // a signal handler may touch it

void note(int signal) { noted.store(signal); }

}  // namespace

SignalGuard::SignalGuard(bool active) : active_(active) {
  if (!active_) return;
  noted.store(0);
  struct sigaction action {};
  action.sa_handler = &note;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);  // a second one ends the program
  sigaction(SIGINT, &action, &before_interrupt_);
  sigaction(SIGTERM, &action, &before_terminate_);
}

SignalGuard::~SignalGuard() {
  if (!active_) return;
  sigaction(SIGINT, &before_interrupt_, nullptr);
  sigaction(SIGTERM, &before_terminate_, nullptr);
}

int SignalGuard::received() const { return active_ ? noted.load() : 0; }

}  // namespace lockstep::train
