#include "launch/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <ostream>
#include <utility>

#include "base/stop.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

constexpr const char* kClearLine = "\x1b[K";  // from the cursor on
constexpr std::chrono::milliseconds kBetweenSignsOfLife(1000), kLongestWait(1000);
constexpr std::chrono::seconds kToReport(2), kAfterTheChief(20);
constexpr int kMostLastWords = 1000;  // reads of the output that an ended rank left

}  // namespace

JobProcesses::JobProcesses(std::vector<ChildCommand> members, const Limits& limits, const Context& context)
    : members_(std::move(members)),
      limits_(limits),
      context_(context),
      is_part_(context.control != nullptr || limits.others_run_elsewhere) {
  try {
    start_all();
  } catch (const Error&) {
    kill_all();
    throw;
  }
  // In a thread of its own: a slow reader of this process's output may block the main thread.
  if (std::none_of(members_.begin(), members_.end(), [](const auto& command) { return command.input.has_value(); }))
    return;
  signs_of_life_ = std::jthread([this](const std::stop_token& stop) {
    while (!stop_requested_by(Deadline::after(kBetweenSignsOfLife), stop)) {
      const std::lock_guard none_comes(adding_);
      for (const auto& child : children_) child->reassure();
    }
  });
}

void JobProcesses::start_all() {
  for (const auto& command : members_) {
    if (const int signal = context_.signals.next()) {  // there may be very many
      pass_on(signal);
      break;
    }
    children_.push_back(std::make_unique<Child>(command));
    context_.reaper.watch(children_.back()->pid());
  }
}

JobProcesses::~JobProcesses() {
  signs_of_life_ = std::jthread();
  kill_all();
}

void JobProcesses::kill_all() {
  for (const auto& child : children_) child->kill();
  const auto limit = Deadline::after(kToReport);
  for (const auto& child : children_) {
    for (; !child->is_gone(); reap(*child)) {
      if (limit.passed()) child->kill();
      usleep(1000);
    }
  }
}

int JobProcesses::run() {
  while (running()) {
    wait();
    for (int signal = context_.signals.next(); signal != 0; signal = context_.signals.next()) pass_on(signal);
    obey_launcher();
    read_all();
    notice_ends();
    notice_nobody();
    notice_those_left_out();
    take_more();
    if (end_at_ && end_at_->passed()) {
      end_at_.reset();
      end_others();
    }
    if (kill_at_ && kill_at_->passed()) kill_what_is_left();
  }
  release_launchers();
  while (read_all()) {  // their remaining output
  }
  // The launcher that started this one has been told at once.
  if (first_ != nullptr && context_.control == nullptr) {
    context_.err << (report_.empty() ? explanation(*first_) : report_) << std::endl;
  }
  if (first_ != nullptr) return first_->status();
  if (asked_ != 0) return report_signal(asked_, context_.err);
  if (is_part_ && !told_to_leave_.empty()) return 128 + SIGTERM;  // the job is not done for that
  const auto ended_well = [](const auto& child) { return child->status() == 0; };
  if (last_lost_ != nullptr && std::none_of(children_.begin(), children_.end(), ended_well)) {
    return last_lost_->status();
  }
  return without_log_.empty() ? 0 : kLogsIncomplete;
}

int JobProcesses::report_signal(int signal, std::ostream& err) {
  err << kReport << "ended by signal " << signal << " (" << strsignal(signal) << ")" << std::endl;
  return 128 + signal;
}

void JobProcesses::obey_launcher() {
  using Kind = ControlProtocol::Message::Kind;
  if (context_.control == nullptr) return;
  for (auto message = context_.control->next(); message.kind != Kind::none; message = context_.control->next()) {
    told_to_end_ |= message.kind == Kind::end || message.kind == Kind::signal;
    if (message.kind == Kind::end) end_others();
    if (message.kind == Kind::signal) pass_on(message.signal);
    if (message.kind == Kind::leave) leave();
    if (message.kind == Kind::launcher_lost) {
      launcher_is_lost_at_ = Deadline::after(std::chrono::duration<double>(limits_.until_launcher_is_lost));
    }
  }
  if (launcher_is_lost_at_ && launcher_is_lost_at_->passed()) {
    launcher_is_lost_at_.reset();
    lose_launcher();
  }
  if (limits_.elastic || !context_.control->silent_for(limits_.longest_silence_seconds) || told_to_end_) return;
  told_to_end_ = true;
  context_.err << kNotice << "the launcher of this job has been silent for " << limits_.longest_silence_seconds << " s"
               << std::endl;
  pass_on(SIGKILL);
}

std::vector<ChildCommand> JobProcesses::launchers_without_word() const {
  std::vector<ChildCommand> launchers;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (children_[i]->ended_without_word()) launchers.push_back(members_[i]);
  }
  return launchers;
}

bool JobProcesses::running() const {
  return std::any_of(children_.begin(), children_.end(), [](const auto& child) { return !child->ended(); });
}

void JobProcesses::wait() {
  const auto* const control = context_.control;
  std::vector<pollfd> polls{{context_.signals.descriptor(), POLLIN, 0},
                            {control != nullptr ? control->descriptor() : -1, POLLIN, 0}};
  for (const auto& child : children_) {
    polls.push_back({child->descriptor(Child::Stream::out), POLLIN, 0});
    polls.push_back({child->descriptor(Child::Stream::error), POLLIN, 0});
  }
  auto longest = kLongestWait;
  if (kill_at_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(kill_at_->time() - Deadline::Clock::now());
    longest = std::clamp(left, std::chrono::milliseconds(0), longest);
  }
  poll(polls.data(), polls.size(), static_cast<int>(longest.count()));
}

// A bounded part, so that signals have their turn. False where there was nothing.
bool JobProcesses::read_all() {
  bool any = false;
  for (const auto& child : children_) any |= read(*child);
  return any;
}

bool JobProcesses::read(Child& child) {
  bool any = child.read(Child::Stream::out, [&](const std::string& line, bool is_replaced) {
    print(child, context_.out, line, is_replaced);
  });
  any |= child.read(Child::Stream::error, [&](const std::string& line, bool is_replaced) {
    const bool ends_job = child.is_controlled() && !limits_.elastic && line.starts_with(kReport);
    if (child.is_controlled() && obey_part(child, line)) return;
    if (!ends_job) return print(child, context_.err, line, is_replaced);
    if (first_ != nullptr || ending_) return;
    report_ = line;
    fails_first(child);
  });
  tell_of_log(child);
  return any;
}

// True where the line is a message of another host's launcher, and no output.
bool JobProcesses::obey_part(Child& child, const std::string& line) {
  const auto message = line + "\n";
  if (message.ends_with(kPartIsHereMessage)) {  // a shell may have printed something before
    if (!ending_) child.let_begin();
    return true;
  }
  if (message == kNobodyIsLeftMessage) {
    child.report_nobody_is_left();
    return true;
  }
  const auto status = status_in(line);
  if (status) child.report_end(*status, limits_.elastic);
  return status.has_value();
}

void JobProcesses::tell_of_log(const Child& child) {
  if (child.log_problem().empty() || !without_log_.insert(&child).second) return;
  context_.err << kReport << child.log_problem() << "; what " << child.name() << " prints from here on is not in it"
               << std::endl;
}

bool JobProcesses::reap(Child& child) {
  return child.reap([this](pid_t group) { context_.reaper.forget(group); });
}

void JobProcesses::print(const Child& child, std::ostream& to, const std::string& line, bool is_replaced) {
  const bool replaces = std::exchange(shows_replaced_, is_replaced);
  to << (replaces ? kClearLine : "") << child.prefix() << line << (is_replaced ? '\r' : '\n') << std::flush;
  if (to.good() || std::exchange(nobody_reads_, true)) return;
  context_.err << kReport << "nobody reads the output any more; the job goes on" << std::endl;
}

// Of processes that ended together, one that was ended by a signal is the cause: the others failed because of it.
void JobProcesses::notice_ends() {
  Child* failed = nullptr;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    auto* const child = children_[i].get();
    const int process = child->pid();
    if (!reap(*child)) continue;
    if (context_.process_ended && !child->is_controlled()) context_.process_ended(process);
    for (int read_now = 0; read_now < kMostLastWords && read(*child); ++read_now) {  // its last lines may say why
    }
    if (child->status() == 0) {
      if (!ending_ && child->rank() >= 0 && context_.ended) context_.ended(child->rank());
      if (child->is_controlled()) takes_more_ = Deadline::after(kAfterTheOthers);  // the training may be over
      if (members_[i].ends_job) end_at_ = Deadline::after(kAfterTheChief);
      continue;
    }
    if (child->is_controlled() && child->status() == kLogsIncomplete) {  // its ranks ended well
      without_log_.insert(child);
      continue;
    }
    if (told_to_leave_.contains(child->name())) {
      last_lost_ = child;  // where all have, the job has not been done
      context_.err << kNotice << child->name() << " has left" << std::endl;
      continue;
    }
    if (!ending_ && replace(i)) continue;
    // Others may have ended because of the chief's failure, and before it.
    const bool is_cause = members_[i].ends_job && ending_ && first_ != nullptr && asked_ == 0 && !child->was_killed();
    if (is_cause && report_.empty()) first_ = child;
    if (failed == nullptr || (failed->signal() == 0 && child->signal() != 0)) failed = child;
  }
  if (failed == nullptr || ending_) return;
  if (context_.control != nullptr) context_.err << explanation(*failed) << std::endl;
  fails_first(*failed);
}

void JobProcesses::fails_first(Child& child) {
  first_ = &child;
  end_others();
}

void JobProcesses::end_others() {
  ending_ = true;
  for (const auto& child : children_) child->end();
  set_out_to_kill();
}

// A closed terminal sends SIGHUP twice: its shell does, and the kernel when the shell has ended.
void JobProcesses::pass_on(int signal) {
  if (signal == SIGHUP && asked_ == SIGHUP) return;
  const bool again = asked_ != 0;
  asked_ = signal;
  ending_ = true;
  if (again || signal == SIGKILL) return kill_what_is_left();
  // SIGHUP is passed on as SIGTERM: a training saves and ends, as on any other request.
  for (const auto& child : children_) child->send(signal == SIGHUP ? SIGTERM : signal);
  set_out_to_kill();
}

// Launchers on other hosts kill after the same time. They get a little longer, to report how their ranks ended.
void JobProcesses::set_out_to_kill() {
  if (kill_at_) return;
  const bool over_hosts =
      std::any_of(children_.begin(), children_.end(), [](const auto& child) { return child->is_controlled(); });
  kill_at_ = Deadline::after(std::chrono::duration<double>(limits_.grace_seconds) +
                             (over_hosts ? kToReport : std::chrono::seconds(0)));
}

void JobProcesses::kill_what_is_left() {
  kill_at_.reset();
  for (const auto& child : children_) {
    if (!child->kill()) kill_at_ = Deadline::after(kToReport);
  }
}

// Those of an elastic job's hosts have held their stores until now. What their ranks printed last may come until they
// are gone.
void JobProcesses::release_launchers() {
  const auto is_gone = [](const auto& child) { return child->is_gone(); };
  const auto limit = Deadline::after(kToReport);
  if (std::all_of(children_.begin(), children_.end(), is_gone)) return;
  kill_what_is_left();
  while (!std::all_of(children_.begin(), children_.end(), is_gone) && !limit.passed()) {
    wait();
    context_.signals.next();
    read_all();
    for (const auto& child : children_) reap(*child);
  }
}

std::string JobProcesses::explanation(const Child& child) const { return kReport + end_of(child); }

std::string JobProcesses::end_of(const Child& child) const {
  const auto& words = child.last_line_written();
  const auto begin = words.find_first_not_of(' ');
  const auto said = begin == std::string::npos ? std::string() : ": " + words.substr(begin);
  const int signal = child.signal();
  if (signal == 0) return text(child.name(), " ended with status ", child.status(), said);
  return text(child.name(), " was ended by signal ", signal, " (", strsignal(signal), ")",
              signal == SIGABRT ? said : std::string());  // of an exception that nobody caught
}

}  // namespace lockstep::launch
