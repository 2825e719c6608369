// The end policy of an elastic job. A member counts for the job while it runs, or when it has ended well, and while the
// job's store names it. A process that came later joins the members; the store may not name it yet.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "cluster/launch/end_policy.h"
#include "cluster/rendezvous.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kBetweenLooks(1), kToFindNobody(60), kAfterTheOthers(5);

class Elastic : public EndPolicy {
 public:
  Elastic(const ElasticLimits& limits, JobStore& store, ChangingHosts* hosts)
      : limits_(limits), store_(store), hosts_(hosts) {}

  Verdict after_failure(const Processes& all, const Child& member) override;
  void after_success(Processes& all, const Child& member) override;
  bool goes_on(Processes& all) override;
  bool goes_on_without_launcher(Processes& all) override;
  std::optional<int> restarts_before_new_start() const override { return restarts_when_nobody_is_left_; }

 private:
  bool enough_are_left(const Processes& all) const;
  bool is_member(const Child& child) const;
  std::string refusal(const Child& child) const;
  bool none_is_named(const Processes& all) const;
  bool is_without_members(const Processes& all) const;
  void find_nobody(const Processes& all);
  void end_those_left_out(Processes& all);
  void take_newcomers(Processes& all);
  void lose(const Child& host, bool found_nobody);

  const ElasticLimits limits_;
  JobStore& store_;
  ChangingHosts* const hosts_;
  int restarted_ = 0;
  std::optional<Deadline> finds_nobody_by_;
  std::optional<int> restarts_when_nobody_is_left_;
  bool ends_left_out_ = false;  // those that still run were left out by those that have ended
  Deadline looks_for_left_out_ = Deadline::after(std::chrono::seconds(0));
  Deadline takes_newcomers_ = Deadline::after(std::chrono::seconds(0));
};

bool joins(const Child& child) { return child.command().environment.contains("LOCKSTEP_JOIN"); }

std::string restart_of(const Child& child) { return child.command().environment.at("LOCKSTEP_RESTART"); }

// Other hosts may come in the place of this one.
void Elastic::lose(const Child& host, bool found_nobody) {
  if (hosts_ != nullptr) hosts_->lost(host.name(), found_nobody);
}

// The job fails where nobody or too few are left, and where it had not begun on another host that failed. A rank that
// failed alone is started again while there are restarts. Where processes that wait to join will find whether anybody
// is left, the job goes on until they have.
Verdict Elastic::after_failure(const Processes& all, const Child& member) {
  if (is_without_members(all)) {
    find_nobody(all);
    if (member.is_launcher() && !member.found_nobody()) lose(member, false);
    return {};
  }
  const bool are_unnamed = none_is_named(all);
  const bool others_tell = are_unnamed || (member.found_nobody() && all.are_running());
  if (!enough_are_left(all) && !others_tell) return {};
  const bool has_begun = store_.has_begun();
  if (!has_begun && member.is_launcher()) return {};
  if (!has_begun) store_.rank_will_not_come(member.rank());
  const bool may_start = has_begun && !member.is_launcher() && !others_tell &&
                         (all.are_running() || limits_.is_a_part) && refusal(member).empty();
  if (may_start && restarted_ < limits_.restarts) {
    return {.goes_on = true, .restart = ++restarted_, .restarts = limits_.restarts, .joins = true};
  }
  if (are_unnamed) finds_nobody_by_ = Deadline::after(kToFindNobody);
  lose(member, member.found_nobody());
  return {.goes_on = true};
}

// The training may be over: hosts that come now would find nobody.
void Elastic::after_success(Processes& /*all*/, const Child& member) {
  if (member.is_launcher()) takes_newcomers_ = Deadline::after(kAfterTheOthers);
}

bool Elastic::goes_on(Processes& all) {
  // Those that wait have had the time to find that nobody is left. One that hangs is no member either.
  if (finds_nobody_by_ && finds_nobody_by_->passed()) {
    finds_nobody_by_.reset();
    if (none_is_named(all)) {
      find_nobody(all);
      return false;
    }
  }
  end_those_left_out(all);
  take_newcomers(all);
  return true;
}

// The launcher's host may be lost: then the members decide whether they go on, and nobody reads their output. A
// launcher that lives takes this host for lost and may find another one in its place.
bool Elastic::goes_on_without_launcher(Processes& all) {
  if (!store_.has_begun()) return false;
  if (store_.first_launcher_lives()) {
    all.leave();
  } else {
    all.notice("the launcher of this job is lost; this host's processes go on");
  }
  return true;
}

// True where as many ranks are left as the job needs.
bool Elastic::enough_are_left(const Processes& all) const {
  int left = 0;
  for (const auto& child : all.children()) {
    if (!child->ended() || child->status() == 0) left += child->command().ranks;
  }
  return left >= limits_.fewest;
}

// Another host's launcher looks after its own processes.
bool Elastic::is_member(const Child& child) const {
  return child.is_launcher() || store_.is_member(child.rank(), joins(child) ? restart_of(child) : "");
}

// Returns why a process that came later was not taken in, as it told its launcher. Empty where it told nothing.
std::string Elastic::refusal(const Child& child) const {
  if (!joins(child) || child.was_killed()) return {};
  return store_.refusal(child.rank(), restart_of(child));
}

// True where processes run, and the store names none of them as a member. Those that wait to join find that nobody can
// take them in, and end; one that was taken in goes on.
bool Elastic::none_is_named(const Processes& all) const {
  if (limits_.is_a_part || !all.are_running() || !store_.has_begun()) return false;
  return std::none_of(all.children().begin(), all.children().end(),
                      [this](const auto& child) { return !child->ended() && is_member(*child); });
}

// True where the job has lost its last member: none runs, or has ended well. A process that came later may have been
// taken in just now; it says itself whether it was. Where other launchers run a part of the job, a process must also
// have found that nobody is left elsewhere.
bool Elastic::is_without_members(const Processes& all) const {
  if (!store_.has_begun()) return false;
  bool have_found_nobody = false;
  for (const auto& child : all.children()) {
    if (!child->ended() && joins(*child)) return false;
    if ((!child->ended() || child->status() == 0) && is_member(*child)) return false;
    have_found_nobody |= child->found_nobody() || refusal(*child) == cluster::kNobodyIsLeft;
  }
  const bool is_whole = !limits_.is_a_part && !all.children()[0]->is_launcher();
  return is_whole || have_found_nobody;
}

// The restarts of processes that were never taken in are given back.
void Elastic::find_nobody(const Processes& all) {
  int used = restarted_;
  for (const auto& child : all.children()) {
    if (joins(*child) && (!child->ended() || refusal(*child) == cluster::kNobodyIsLeft)) --used;
  }
  restarts_when_nobody_is_left_ = used;
}

// A process that does not answer would never end. Another host's launcher looks after its own ranks.
void Elastic::end_those_left_out(Processes& all) {
  if (ends_left_out_ || !looks_for_left_out_.passed()) return;
  looks_for_left_out_ = Deadline::after(kBetweenLooks);
  std::vector<const Child*> left;
  for (const auto& child : all.children()) {
    if (child->ended()) continue;
    if (joins(*child) || child->is_launcher()) return;
    left.push_back(child.get());
  }
  const bool some_ended = left.size() < all.children().size();
  if (left.empty() || (!some_ended && !limits_.is_a_part)) return;
  for (const auto* child : left) {
    if (!store_.was_left_out(child->rank())) return;
  }
  ends_left_out_ = true;
  all.end_after(kAfterTheOthers);
  for (const auto* child : left) {
    all.notice(text(child->name(), " was left out by the others, which have ended; it is ended in ",
                    kAfterTheOthers.count(), " s"));
  }
}

// Hosts that have come, and those that are to leave: their ranks get SIGTERM.
void Elastic::take_newcomers(Processes& all) {
  if (hosts_ == nullptr || !takes_newcomers_.passed() || !store_.has_begun()) return;
  takes_newcomers_ = Deadline::after(kBetweenLooks);
  for (auto& command : hosts_->newcomers(all)) {
    const auto name = command.name;
    all.notice(text(name, " joins with ", command.ranks, " rank(s)"));
    try {
      all.start(std::move(command));
    } catch (const Error& error) {
      all.notice(text(name, " cannot be started: ", error.what()));
      hosts_->lost(name, false);
    }
  }
  for (const auto& child : all.children()) {
    if (child->ended() || child->was_told_to_leave() || !hosts_->is_to_leave(child->name())) continue;
    all.notice(child->name() + " is not named any more: its ranks leave");
    child->leave();
  }
}

}  // namespace

std::unique_ptr<EndPolicy> end_elastically(const ElasticLimits& limits, JobStore& store, ChangingHosts* hosts) {
  return std::make_unique<Elastic>(limits, store, hosts);
}

}  // namespace lockstep::launch
