#include <csignal>
#include <thread>
#include <type_traits>

#include "base/failure.h"
#include "base/text.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/group_wrappers.h"

namespace lockstep {
namespace {

class Faults final : public collective::Wrapper {
 public:
  Faults(std::shared_ptr<GroupBackend> victim, std::vector<Fault> faults)
      : collective::Wrapper(std::move(victim)), faults_(std::move(faults)) {}

  const char* run(const Call& call, Deadline deadline) override {
    return with_hook([&] { return collective::Wrapper::run(call, deadline); });
  }
  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    return with_hook([&] { return collective::Wrapper::exchange(calls, deadline); });
  }
  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override {
    return with_hook([&] { return collective::Wrapper::enqueue(calls, deadline); });
  }

 private:
  template <class Act>
  std::invoke_result_t<Act> with_hook(const Act& act) {
    FailHook hook = [this](const char* place) { come_to(place); };
    struct Unhook {
      ~Unhook() { fail_hook = nullptr; }
    } unhook;
    come_to("");
    fail_hook = &hook;
    auto result = act();
    ++calls_;
    return result;
  }

  void come_to(const std::string& place) {
    for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
      if (fault->call != calls_ || fault->place != place) continue;
      const auto due = *fault;
      faults_.erase(fault);
      return happen(due);
    }
  }

  void happen(const Fault& fault) {
    switch (fault.action) {
      case Fault::Action::delay: std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds)); break;
      case Fault::Action::kill: raise(SIGKILL); break;
      case Fault::Action::stop: raise(SIGSTOP); break;
      case Fault::Action::abort: fail(Failure::aborted(rank(), "a fault was injected")); break;
      case Fault::Action::error: throw Error(text("a fault was injected into call ", fault.call));
    }
  }

  std::vector<Fault> faults_;
  std::int64_t calls_ = 0;
};

}  // namespace

Group with_faults(const Group& group, std::vector<Fault> faults) {
  return group.with_backend(std::make_shared<Faults>(group.shared_backend(), std::move(faults)));
}

}  // namespace lockstep
