// For tests: processes that are fibers of one thread, with a virtual clock. A seed decides what happens when, so that
// a run can be made again.
#pragma once

#include <cxxabi.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)  // which must know of stacks that take turns
#include <sanitizer/common_interface_defs.h>
#endif

namespace lockstep::elastic {

class Simulation {
 public:
  // Thrown in a process that has been killed, where it waits.
  struct Killed {};

  explicit Simulation(unsigned seed) : random_(seed) {}

  // Kills the processes that have not ended.
  ~Simulation() {
    for (auto& process : processes_) {
      process->died_at = std::min(process->died_at, now_);
      if (!process->ended) resume(*process);
    }
  }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Makes a process that begins at that time; returns its number.
  int start(double time, std::function<void()> body) {
    auto process = std::make_unique<Process>();
    process->body = std::move(body);
    process->simulation = this;
    processes_.push_back(std::move(process));
    const int number = static_cast<int>(processes_.size()) - 1;
    wake(number, time);
    return number;
  }

  void kill_at(double time, int process) { processes_[at(process)]->died_at = time; }

  // Stops a process at that time, for `seconds`.
  void stop_at(double time, double seconds, int process) { processes_[at(process)]->stops.push_back({time, seconds}); }

  // Runs until all processes have ended. False where some wait for nothing that is to come, or longer than `longest`.
  bool run(double longest) {
    while (!events_.empty() && now_ < longest) {
      std::pop_heap(events_.begin(), events_.end(), std::greater<>());
      const auto event = events_.back();
      events_.pop_back();
      auto& process = *processes_[at(event.process)];
      if (process.ended || event.turn != process.turns) continue;
      if (const double until = stopped_until(process, event.time); until > event.time) {
        wake(event.process, until);
        continue;
      }
      now_ = std::max(now_, event.time);
      running_number_ = event.process;
      if (process.waits && now_ < process.until && process.died_at > now_ && !process.holds()) continue;
      resume(process);
    }
    return std::all_of(processes_.begin(), processes_.end(), [](const auto& process) { return process->ended; });
  }

  // --- calls of the process that runs

  double now() const { return now_; }
  int self() const { return running_number_; }

  void sleep(double seconds) {
    wake(self(), now_ + seconds);
    yield();
  }
  void pass_some_time() { sleep(random(0.0001, 0.002)); }

  // Waits until holds(), which is called some time after each `notify`; false where it does not hold at `until`.
  template <class Holds>
  bool wait(const Holds& holds, double until) {
    auto& process = *processes_[at(self())];
    while (!holds()) {
      if (now_ >= until) return false;
      process.waits = true;
      process.until = until;
      process.holds = std::cref(holds);
      wake(self(), until);
      yield();
    }
    return true;
  }
  void notify() {
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      if (processes_[i]->waits) wake(static_cast<int>(i), now_ + random(0.00005, 0.001));
    }
  }

  bool is_alive(int process) const { return died_at(process) > now_ && !processes_[at(process)]->ended; }
  double died_at(int process) const { return processes_[at(process)]->died_at; }

  double random(double from, double to) {
    return from + (to - from) * (static_cast<double>(random_()) / (static_cast<double>(std::mt19937::max()) + 1));
  }
  int random_below(int end) { return static_cast<int>(random(0, end)); }
  bool chance(double probability) { return random(0, 1) < probability; }

 private:
  static constexpr std::size_t kStack = 128 * 1024;

  // Stacks that are kept for the next simulation: the system takes longer to give a new one.
  static std::vector<std::unique_ptr<std::byte[]>>& spare_stacks() {
    static std::vector<std::unique_ptr<std::byte[]>> all;
    return all;
  }
  static std::unique_ptr<std::byte[]> take_stack() {
    auto& spare = spare_stacks();
    if (spare.empty()) return std::unique_ptr<std::byte[]>(new std::byte[kStack]);
    auto stack = std::move(spare.back());
    spare.pop_back();
    return stack;
  }

  struct Process {
    ~Process() { spare_stacks().push_back(std::move(stack)); }

    std::function<void()> body;
    Simulation* simulation = nullptr;
    std::unique_ptr<std::byte[]> stack = take_stack();
    ucontext_t context = {}, caller = {};
    std::array<std::byte, 16> exceptions = {};  // that it is handling, as the runtime library keeps them
    bool begun = false, ended = false, waits = false;
    std::function<bool()> holds;  // the condition that it waits for
    double until = 0;             // the end of the wait
    double died_at = std::numeric_limits<double>::infinity();
    std::vector<std::pair<double, double>> stops;  // from a time on, seconds
    long turns = 0;                                // how often it ran
    void* sanitizers = nullptr;                    // AddressSanitizer's record of it, and of its resumer
    const void* outer_stack = nullptr;
    std::size_t outer_size = 0;
  };

  struct Event {
    double time = 0;
    long order = 0;
    int process = 0;
    long turn = 0;  // of the process: where that has run since, the event is void
    bool operator>(const Event& other) const { return std::pair(time, order) > std::pair(other.time, other.order); }
  };

  static std::size_t at(int process) { return static_cast<std::size_t>(process); }

  static double stopped_until(const Process& process, double time) {
    for (const auto& [begin, seconds] : process.stops) {
      if (time >= begin && time < begin + seconds) return begin + seconds;
    }
    return time;
  }

  void wake(int process, double time) {
    events_.push_back({time, events_made_++, process, processes_[at(process)]->turns});
    std::push_heap(events_.begin(), events_.end(), std::greater<>());
  }

  void resume(Process& process) {
    ++process.turns;
    process.waits = false;
    auto* const outer = std::exchange(running_, &process);
    if (!std::exchange(process.begun, true)) {
      getcontext(&process.context);
      process.context.uc_stack.ss_sp = process.stack.get();
      process.context.uc_stack.ss_size = kStack;
      process.context.uc_link = &process.caller;
      const auto pointer = reinterpret_cast<std::uintptr_t>(&process);
      makecontext(&process.context, reinterpret_cast<void (*)()>(&enter), 2, static_cast<unsigned>(pointer >> 32),
                  static_cast<unsigned>(pointer));
    }
    exchange_exceptions(process);
    switch_in(process);
    exchange_exceptions(process);
    running_ = outer;
  }

  void yield() {
    auto& process = *running_;
    switch_out(process);
    if (process.died_at <= now_) throw Killed();
  }

#if defined(__SANITIZE_ADDRESS__)
  static void switch_in(Process& process) {
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, process.stack.get(), kStack);
    swapcontext(&process.caller, &process.context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
  }
  static void switch_out(Process& process) {
    __sanitizer_start_switch_fiber(&process.sanitizers, process.outer_stack, process.outer_size);
    swapcontext(&process.context, &process.caller);
    arrive(process);
  }
  static void arrive(Process& process) {
    __sanitizer_finish_switch_fiber(process.sanitizers, &process.outer_stack, &process.outer_size);
  }
  static void leave(Process& process) {
    __sanitizer_start_switch_fiber(nullptr, process.outer_stack, process.outer_size);
  }
#else
  static void switch_in(Process& process) { swapcontext(&process.caller, &process.context); }
  static void switch_out(Process& process) { swapcontext(&process.context, &process.caller); }
  static void arrive(Process&) {}
  static void leave(Process&) {}
#endif

  static void exchange_exceptions(Process& process) {
    auto* const current = reinterpret_cast<std::byte*>(abi::__cxa_get_globals());
    std::swap_ranges(process.exceptions.begin(), process.exceptions.end(), current);
  }

  static void enter(unsigned high, unsigned low) {
    auto& process = *reinterpret_cast<Process*>((static_cast<std::uintptr_t>(high) << 32) | low);
    arrive(process);
    try {
      if (process.died_at > process.simulation->now_) process.body();
    } catch (const Killed&) {
    }
    process.ended = true;
    process.simulation->notify();
    leave(process);
  }

  std::mt19937 random_;
  double now_ = 0;
  long events_made_ = 0;
  std::vector<Event> events_;  // a heap, the next one first
  std::vector<std::unique_ptr<Process>> processes_;
  Process* running_ = nullptr;
  int running_number_ = -1;
};

}  // namespace lockstep::elastic
