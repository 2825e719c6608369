#include "cluster/launch/end_policy.h"

#include <map>

namespace lockstep::launch {

// The end policy of a job with parameter servers.

namespace {

constexpr std::chrono::seconds kAfterTheChief(20);

class Roles : public EndPolicy {
 public:
  explicit Roles(int restarts) : restarts_(restarts) {}

  Verdict after_failure(const Processes& all, const Child& member) override;
  void after_success(Processes& all, const Child& member) override;
  std::optional<int> restarts_before_new_start() const override { return std::nullopt; }

 private:
  const int restarts_;
  std::map<std::string, int> restarted_;  // [role]
};

bool is_worker(const Child& child) { return child.command().role == "worker"; }

// True where no other worker computes, or has ended well.
bool is_last_worker(const Processes& all, const Child& member) {
  if (!is_worker(member)) return false;
  for (const auto& other : all.children()) {
    if (other.get() != &member && is_worker(*other) && (!other->ended() || other->status() == 0)) return false;
  }
  return true;
}

// A worker that fails is started again, and the job may go on without it. A server or the chief that a signal ended is
// started again; where it failed by itself, it would fail again. The launcher of another host, which has no role, has
// done all that for its own processes.
Verdict Roles::after_failure(const Processes& all, const Child& member) {
  const auto& command = member.command();
  if (command.role.empty()) return {};
  int& restarted = restarted_[command.role];
  if ((command.dispensable || member.was_killed()) && restarted < restarts_) {
    return {.goes_on = true, .restart = ++restarted, .restarts = restarts_};
  }
  return {.goes_on = command.dispensable && !is_last_worker(all, member)};
}

// The others learn from the chief that the job is over, and have some time to end by themselves.
void Roles::after_success(Processes& all, const Child& member) {
  if (member.command().ends_job) all.end_after(kAfterTheChief);
}

}  // namespace

std::unique_ptr<EndPolicy> end_by_role(int restarts) { return std::make_unique<Roles>(restarts); }

}  // namespace lockstep::launch
