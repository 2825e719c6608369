// A counter that ranks in several threads or processes watch, and how long a wait spins before it blocks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::transport {

// How often a wait looks before it blocks in the kernel.
struct SpinThenBlock {
  int spins = 0;   // with the processor's pause between
  int yields = 0;  // after giving the core to another thread; for more ranks than cores
};

// Written by one rank, watched by any; lies in memory that all map. Starts as zero bytes.
class Signal {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Counters wrap: `target` is reached within half their range.
  bool reached(std::uint32_t target) const { return static_cast<std::int32_t>(value() - target) >= 0; }

  // A watcher that sees `value` also sees everything that the writer wrote before.
  void set(std::uint32_t value);
  void add(std::uint32_t difference);  // any rank may

  // Returns as soon as the value may have changed from `seen`; at the latest after `most`.
  void sleep_while(std::uint32_t seen, std::chrono::nanoseconds most);

  // Wakes all sleepers, so that they check again.
  void wake_all();

 private:
  std::atomic<std::uint32_t> value_;
  std::atomic<std::uint32_t> sleepers_;
};

void pause_processor();
void yield_processor();

// Asks ready() until it is true, or `spin` is used up; returns what it said last.
template <class Ready>
bool spin_until(const SpinThenBlock& spin, const Ready& ready) {
  if (ready()) return true;
  for (int i = 0; i < spin.spins; ++i) {
    pause_processor();
    if (ready()) return true;
  }
  for (int i = 0; i < spin.yields; ++i) {
    yield_processor();
    if (ready()) return true;
  }
  return false;
}

}  // namespace lockstep::transport
