#include "cluster/launch/supervisor.h"

#include <signal.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <utility>

#include "base/text.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kToReleaseLaunchers(2);
constexpr int kMostLastWords = 1000;  // reads of the output that an ended rank left

}  // namespace

Supervisor::Supervisor(std::vector<ChildCommand> members, const Job& job, const LauncherProcess& self)
    : job_(job), self_(self), processes_(self, job.grace_seconds) {
  for (auto& command : members) {
    if (const int signal = self_.signals.next()) {  // there may be very many
      pass_on(signal);
      break;
    }
    processes_.start(std::move(command));
  }
}

int Supervisor::run() {
  while (processes_.are_running()) {
    processes_.wait({self_.signals.descriptor(), job_.launcher != nullptr ? job_.launcher->descriptor() : -1});
    for (int signal = self_.signals.next(); signal != 0; signal = self_.signals.next()) pass_on(signal);
    obey_launcher();
    read_all();
    notice_ends();
    if (!processes_.are_ending() && !job_.policy.goes_on(processes_)) fail(*last_lost_);
    processes_.end_those_whose_time_is_up();
  }
  release_launchers();
  while (read_all()) {  // their remaining output
  }
  return status();
}

int Supervisor::status() const {
  // The launcher that started this one has been told at once.
  if (first_ != nullptr && job_.launcher == nullptr) {
    self_.err << (report_.empty() ? kReport + first_->how_it_ended() : report_) << std::endl;
  }
  if (first_ != nullptr) return first_->status();
  if (asked_ != 0 && job_.launcher != nullptr && job_.launcher->ranks_are_to_end()) return 128 + asked_;  // it says so
  if (asked_ != 0) return report_signal(asked_, self_.err);
  const auto any = [this](const auto& holds) {
    return std::any_of(processes_.children().begin(), processes_.children().end(), holds);
  };
  if (job_.launcher != nullptr && any([](const auto& child) { return child->was_told_to_leave(); })) {
    return 128 + SIGTERM;  // the job is not done for that
  }
  if (last_lost_ != nullptr && !any([](const auto& child) { return child->status() == 0; })) {
    return last_lost_->status();
  }
  const bool others_lack_logs =
      any([](const auto& child) { return child->is_launcher() && child->status() == kLogsIncomplete; });
  return processes_.logs_are_whole() && !others_lack_logs ? 0 : kLogsIncomplete;
}

int Supervisor::report_signal(int signal, std::ostream& err) {
  err << kReport << "ended by signal " << signal << " (" << strsignal(signal) << ")" << std::endl;
  return 128 + signal;
}

bool Supervisor::read_all() {
  const bool any = processes_.read_all();
  for (const auto& child : processes_.children()) note_report(*child);
  return any;
}

// Another host's launcher has named a failure among its ranks: the others end at once.
void Supervisor::note_report(const Child& child) {
  if (child.report().empty() || first_ != nullptr || processes_.are_ending()) return;
  report_ = child.report();
  fail(child);
}

void Supervisor::obey_launcher() {
  using Kind = OtherLauncher::Message::Kind;
  if (job_.launcher == nullptr) return;
  for (auto message = job_.launcher->next(); message.kind != Kind::none; message = job_.launcher->next()) {
    if (message.kind == Kind::end) processes_.end();
    if (message.kind == Kind::signal) pass_on(message.signal);
    if (message.kind == Kind::leave) processes_.leave();
    if (message.kind == Kind::silent) {
      processes_.notice(
          text("the launcher of this job has been silent for ", job_.launcher->patience().silence_seconds, " s"));
      pass_on(SIGKILL);
    }
    if (message.kind != Kind::lost) continue;
    if (job_.launcher->ranks_are_to_end() || !job_.policy.goes_on_without_launcher(processes_)) pass_on(SIGKILL);
  }
}

// A closed terminal sends SIGHUP twice: its shell does, and the kernel when the shell has ended.
void Supervisor::pass_on(int signal) {
  if (signal == SIGHUP && asked_ == SIGHUP) return;
  const bool again = asked_ != 0;
  asked_ = signal;
  if (again || signal == SIGKILL) return processes_.kill();
  // SIGHUP is passed on as SIGTERM: a training saves and ends, as on any other request.
  processes_.send(signal == SIGHUP ? SIGTERM : signal);
}

// Where several processes ended together, one that a signal ended is the cause: the others failed because of it.
void Supervisor::notice_ends() {
  const Child* failed = nullptr;
  for (const auto& child : processes_.children()) {
    if (!has_just_ended(*child) || ended_well(*child) || goes_on_after(*child)) continue;
    // Others may have ended because of the chief's failure, and before it.
    const bool is_cause = child->command().ends_job && processes_.are_ending() && first_ != nullptr && asked_ == 0 &&
                          !child->was_killed();
    if (is_cause && report_.empty()) first_ = child.get();
    if (failed == nullptr || (failed->signal() == 0 && child->signal() != 0)) failed = child.get();
  }
  if (failed == nullptr || processes_.are_ending()) return;
  if (job_.launcher != nullptr) self_.err << kReport << failed->how_it_ended() << std::endl;
  fail(*failed);
}

bool Supervisor::has_just_ended(Child& child) {
  const int process = child.pid();
  if (!processes_.reap(child)) return false;
  if (!child.is_launcher()) job_.store.process_has_ended(process);
  for (int read_now = 0; read_now < kMostLastWords && processes_.read(child); ++read_now) {  // they may say why
  }
  note_report(child);
  return true;
}

bool Supervisor::ended_well(const Child& child) {
  if (child.is_launcher() && child.status() == kLogsIncomplete) return true;  // its ranks did
  if (child.status() != 0) return false;
  if (!processes_.are_ending() && child.rank() >= 0) job_.store.rank_will_not_come(child.rank());
  job_.policy.after_success(processes_, child);
  return true;
}

// The child is another one after this where a process was started in its place.
bool Supervisor::goes_on_after(const Child& child) {
  if (child.was_told_to_leave()) {
    last_lost_ = &child;  // where all have left, the job has not been done
    processes_.notice(child.name() + " has left");
    return true;
  }
  if (processes_.are_ending()) return false;
  const auto verdict = job_.policy.after_failure(processes_, child);
  if (!verdict.goes_on) return false;
  if (verdict.restart > 0) {
    start_again(child, verdict);
  } else {
    last_lost_ = &child;
    processes_.notice(child.how_it_ended() + "; the job goes on without it");
  }
  return true;
}

void Supervisor::start_again(const Child& child, const Verdict& verdict) {
  auto command = child.command();
  processes_.notice(text(child.how_it_ended(), "; it is started again (restart ", verdict.restart, " of ",
                         verdict.restarts, command.role.empty() ? "" : ", role " + command.role, ")"));
  auto& number = command.environment["LOCKSTEP_RESTART"];
  number = std::to_string(whole_number(number).value_or(0) + 1);
  if (verdict.joins) command.environment["LOCKSTEP_JOIN"] = "1";
  processes_.replace(child, std::move(command));
}

void Supervisor::fail(const Child& child) {
  first_ = &child;
  processes_.end();
}

// Those of an elastic job's hosts have held their stores until now. What their ranks printed last may come until they
// are gone.
void Supervisor::release_launchers() {
  if (processes_.are_gone()) return;
  const auto limit = Deadline::after(kToReleaseLaunchers);
  processes_.kill();
  while (!processes_.are_gone() && !limit.passed()) {
    processes_.wait({self_.signals.descriptor()});
    self_.signals.next();
    read_all();
    for (const auto& child : processes_.children()) processes_.reap(*child);
  }
}

}  // namespace lockstep::launch
