#include "cluster/launch/processes.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "base/mutex.h"

namespace lockstep::launch {
namespace {

constexpr const char* kClearLine = "\x1b[K";  // from the cursor on
constexpr const char* kNotice = "lockstep: ";
constexpr std::chrono::milliseconds kBetweenSignsOfLife(1000), kLongestWait(1000);
constexpr std::chrono::seconds kToReport(2);

}  // namespace

void Processes::show_life_to(Child& launcher) {
  MutexLock lock(mutex_);
  launchers_.push_back(&launcher);
  if (signs_of_life_.joinable()) return;
  signs_of_life_ = std::jthread([this](const std::stop_token& stop) {
    while (!stop_requested_by(Deadline::after(kBetweenSignsOfLife), stop)) {
      MutexLock none_comes(mutex_);
      for (auto* const each : launchers_) each->reassure();
    }
  });
}

Processes::~Processes() {
  kill();
  const auto limit = Deadline::after(kToReport);
  for (const auto& child : children_) {
    for (; !child->is_gone(); reap(*child)) {
      if (limit.passed()) child->kill();
      usleep(1000);
    }
  }
}

std::unique_ptr<Child> Processes::started(ChildCommand command) {
  auto child = std::make_unique<Child>(std::move(command));
  launcher_.reaper.watch(child->pid());
  if (child->is_launcher()) show_life_to(*child);
  return child;
}

void Processes::start(ChildCommand command) { children_.push_back(started(std::move(command))); }

void Processes::replace(const Child& child, ChildCommand command) {
  auto next = started(std::move(command));
  *std::find_if(children_.begin(), children_.end(), [&](const auto& each) { return each.get() == &child; }) =
      std::move(next);
}

bool Processes::are_running() const {
  return std::any_of(children_.begin(), children_.end(), [](const auto& child) { return !child->ended(); });
}

bool Processes::are_gone() const {
  return std::all_of(children_.begin(), children_.end(), [](const auto& child) { return child->is_gone(); });
}

void Processes::wait(std::initializer_list<int> others) const {
  std::vector<pollfd> polls;
  for (const int descriptor : others) polls.push_back({descriptor, POLLIN, 0});
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

bool Processes::read_all() {
  bool any = false;
  for (const auto& child : children_) any |= read(*child);
  return any;
}

bool Processes::read(Child& child) {
  bool any = false;
  for (const auto stream : {Child::Stream::out, Child::Stream::error}) {
    auto& to = stream == Child::Stream::out ? launcher_.out : launcher_.err;
    any |= child.read(stream, [&](const std::string& line, bool is_replaced) { print(child, to, line, is_replaced); });
  }
  const auto problem = child.take_log_problem();
  if (problem.empty()) return any;
  logs_are_whole_ = false;
  launcher_.err << kReport << problem << "; what " << child.name() << " prints from here on is not in it" << std::endl;
  return any;
}

void Processes::print(const Child& child, std::ostream& to, const std::string& line, bool is_replaced) {
  const bool replaces = std::exchange(shows_replaced_, is_replaced);
  to << (replaces ? kClearLine : "") << child.command().prefix << line << (is_replaced ? '\r' : '\n') << std::flush;
  if (to.good() || std::exchange(nobody_reads_, true)) return;
  launcher_.err << kReport << "nobody reads the output any more; the job goes on" << std::endl;
}

bool Processes::reap(Child& child) {
  return child.reap([this](pid_t group) { launcher_.reaper.forget(group); });
}

void Processes::notice(const std::string& line) const { launcher_.err << kNotice << line << std::endl; }

void Processes::leave() {
  for (const auto& child : children_) child->leave();
}

void Processes::send(int signal) {
  are_ending_ = true;
  for (const auto& child : children_) child->send(signal);
  kill_after_grace();
}

void Processes::end() {
  are_ending_ = true;
  for (const auto& child : children_) child->end();
  kill_after_grace();
}

// Launchers on other hosts kill after the same time. They get a little longer, to report how their ranks ended.
void Processes::kill_after_grace() {
  if (kill_at_) return;
  const bool over_hosts =
      std::any_of(children_.begin(), children_.end(), [](const auto& child) { return child->is_launcher(); });
  kill_at_ = Deadline::after(std::chrono::duration<double>(grace_seconds_) +
                             (over_hosts ? kToReport : std::chrono::seconds(0)));
}

void Processes::kill() {
  are_ending_ = true;
  kill_at_.reset();
  for (const auto& child : children_) {
    if (!child->kill()) kill_at_ = Deadline::after(kToReport);
  }
}

void Processes::end_those_whose_time_is_up() {
  if (end_at_ && end_at_->passed()) {
    end_at_.reset();
    end();
  }
  if (kill_at_ && kill_at_->passed()) kill();
}

}  // namespace lockstep::launch
