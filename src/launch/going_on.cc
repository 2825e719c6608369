// How a job goes on without processes, with others in their place, and with more.
#include <signal.h>

#include <algorithm>
#include <mutex>
#include <ostream>
#include <utility>

#include "base/text.h"
#include "cluster/rendezvous.h"
#include "launch/processes.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kBetweenLooks(1), kToFindNobody(60);

}  // namespace

// Whether the job goes on without the process, or with another one in its place.
bool JobProcesses::replace(std::size_t index) {
  auto& command = members_[index];
  const auto& role = command.role;
  auto& child = *children_[index];
  if (is_without_members()) {
    find_nobody();
    if (child.is_controlled() && !child.found_nobody() && context_.lost) context_.lost(child.name(), false);
    return false;
  }
  const bool are_unnamed = none_is_named();
  const bool others_tell = are_unnamed || (child.found_nobody() && running());
  const bool goes_on_elastically = role.empty() && (enough_are_left() || others_tell);
  if (role.empty() && !goes_on_elastically) return false;
  const bool has_begun = goes_on_elastically && begun();
  if (child.is_controlled() && !has_begun) return false;
  const bool can_join = has_begun && !child.is_controlled();
  if (goes_on_elastically && !has_begun && context_.ended) context_.ended(child.rank());
  int& restarted = restarted_[role];
  const bool may_start = role.empty() ? can_join && !others_tell && (running() || is_part_) && refusal(index).empty()
                                      : command.dispensable || child.was_killed();
  const bool starts_again = may_start && restarted < limits_.restarts;
  if (!starts_again && !goes_on_elastically && (!command.dispensable || is_last_worker(index))) return false;
  const auto what = kNotice + end_of(child);
  if (!starts_again) {
    last_lost_ = &child;
    if (are_unnamed) finds_nobody_by_ = Deadline::after(kToFindNobody);
    if (context_.lost) context_.lost(child.name(), child.found_nobody());
    context_.err << what << "; the job goes on without it" << std::endl;
    return true;
  }
  ++restarted;
  context_.err << what << "; it is started again (restart " << restarted << " of " << limits_.restarts
               << (role.empty() ? "" : ", role " + role) << ")" << std::endl;
  auto& number = command.environment["LOCKSTEP_RESTART"];
  number = std::to_string(whole_number(number).value_or(0) + 1);
  if (goes_on_elastically) command.environment["LOCKSTEP_JOIN"] = "1";
  replaced_.push_back(std::move(children_[index]));
  children_[index] = std::make_unique<Child>(command);
  context_.reaper.watch(children_[index]->pid());
  return true;
}

// Its host may be lost: then the members decide whether they go on, and nobody reads their output. Where that launcher
// lives, it takes this host for lost and may find another one in its place.
void JobProcesses::lose_launcher() {
  if (!limits_.elastic || told_to_end_ || !context_.has_begun()) return pass_on(SIGKILL);
  if (context_.launcher_lives()) return leave();
  context_.err << kNotice << "the launcher of this job is lost; this host's processes go on" << std::endl;
}

// The ranks of this host leave the job behind a step, however long that takes.
void JobProcesses::leave() {
  for (const auto& child : children_) {
    told_to_leave_.insert(child->name());
    child->send(SIGTERM);
  }
}

// One that does not answer would never end.
void JobProcesses::notice_those_left_out() {
  if (!limits_.elastic || ending_ || ends_left_out_ || !context_.was_left_out || !looks_again_.passed()) return;
  looks_again_ = Deadline::after(kBetweenLooks);
  std::vector<const Child*> left;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    // A host's launcher looks after its own ranks.
    if (!children_[i]->ended() && (joins(i) || children_[i]->is_controlled())) return;
    if (!children_[i]->ended()) left.push_back(children_[i].get());
  }
  const bool some_ended = left.size() < children_.size();
  if (left.empty() || (!some_ended && !is_part_)) return;
  for (const auto* child : left) {
    if (!context_.was_left_out(child->rank())) return;
  }
  ends_left_out_ = true;
  end_at_ = Deadline::after(kAfterTheOthers);
  for (const auto* child : left) {
    context_.err << kNotice << child->name() << " was left out by the others, which have ended; it is ended in "
                 << kAfterTheOthers.count() << " s" << std::endl;
  }
}

// Hosts that have come, and those that are to leave: their ranks get SIGTERM.
void JobProcesses::take_more() {
  if (!context_.more || ending_ || !takes_more_.passed() || !context_.has_begun()) return;
  takes_more_ = Deadline::after(kBetweenLooks);
  for (auto& command : context_.more(*this)) {
    context_.err << kNotice << command.name << " joins with " << command.ranks << " rank(s)" << std::endl;
    told_to_leave_.erase(command.name);
    try {
      auto child = std::make_unique<Child>(command);
      context_.reaper.watch(child->pid());
      members_.push_back(std::move(command));
      const std::lock_guard adding(adding_);
      children_.push_back(std::move(child));
    } catch (const Error& error) {
      context_.err << kNotice << command.name << " cannot be started: " << error.what() << std::endl;
      context_.lost(command.name, false);
    }
  }
  for (const auto& child : children_) {
    if (child->ended() || !context_.is_to_leave(child->name()) || !told_to_leave_.insert(child->name()).second)
      continue;
    context_.err << kNotice << child->name() << " is not named any more: its ranks leave" << std::endl;
    child->leave();
  }
}

bool JobProcesses::runs(const std::string& name) const {
  return std::any_of(children_.begin(), children_.end(),
                     [&](const auto& child) { return child->name() == name && !child->ended(); });
}

int JobProcesses::ranks(const std::function<bool(const std::string& name)>& counts) const {
  int ranks = 0;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i]->ended() && counts(children_[i]->name())) ranks += members_[i].ranks;
  }
  return ranks;
}

// Of a job with parameter servers: no other worker computes, or has ended well.
bool JobProcesses::is_last_worker(std::size_t index) const {
  if (members_[index].role != "worker") return false;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].role != "worker" || i == index) continue;
    if (!children_[i]->ended() || children_[i]->status() == 0) return false;
  }
  return true;
}

// The reason for which a process that came to the job was not taken in, as it told its launcher. Empty where it told
// none.
std::string JobProcesses::refusal(std::size_t index) const {
  const auto& child = *children_[index];
  if (!joins(index) || child.was_killed() || !context_.refusal) return {};
  return context_.refusal(child.rank(), members_[index].environment.at("LOCKSTEP_RESTART"));
}

// True where the store names the process as a member of an elastic job. The store may not name one yet that was just
// taken in. Each other launcher looks after its own processes.
bool JobProcesses::is_member(std::size_t index) const {
  const auto& child = *children_[index];
  if (child.is_controlled() || !context_.is_member) return true;
  return context_.is_member(child.rank(), joins(index) ? members_[index].environment.at("LOCKSTEP_RESTART") : "");
}

// True where processes of an elastic job run, and the store names none of them as a member. Those that wait to join
// find that nobody can take them in, and end; one that was taken in goes on.
bool JobProcesses::none_is_named() const {
  if (!limits_.elastic || is_part_ || !running() || !begun()) return false;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i]->ended() && is_member(i)) return false;
  }
  return true;
}

// True where an elastic job has lost its last member: none runs, or has ended well. One that came later may have been
// taken in just now; whether it was, it says itself. Where other launchers run a part of the job, a process must also
// have found that nobody is left elsewhere.
bool JobProcesses::is_without_members() const {
  if (!limits_.elastic || !begun()) return false;
  bool have_found_nobody = false;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const auto& child = *children_[i];
    if (!child.ended() && joins(i)) return false;
    if ((!child.ended() || child.status() == 0) && is_member(i)) return false;
    have_found_nobody |= child.found_nobody() || refusal(i) == cluster::kNobodyIsLeft;
  }
  const bool is_whole = !is_part_ && !children_[0]->is_controlled();
  return is_whole || have_found_nobody;
}

void JobProcesses::find_nobody() {
  nobody_is_left_ = true;
  restarts_used_ = restarted_[""];
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const bool never_taken_in = joins(i) && (!children_[i]->ended() || refusal(i) == cluster::kNobodyIsLeft);
    restarts_used_ -= never_taken_in ? 1 : 0;
  }
}

// Those that wait have had the time to find that nobody is left. One that hangs is no member either.
void JobProcesses::notice_nobody() {
  if (!finds_nobody_by_ || !finds_nobody_by_->passed() || ending_) return;
  finds_nobody_by_.reset();
  if (!none_is_named()) return;
  find_nobody();
  fails_first(*last_lost_);
}

// As many as an elastic job needs.
bool JobProcesses::enough_are_left() const {
  int left = 0;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i]->ended() || children_[i]->status() == 0) left += members_[i].ranks;
  }
  return limits_.elastic && left >= limits_.fewest;
}

}  // namespace lockstep::launch
