#include "elastic/sections.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

std::string bytes_of(const Sections::Numbers& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double)};
}

Sections::Numbers numbers_in(const std::string& bytes) {
  Sections::Numbers numbers(bytes.size() / sizeof(double));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(double));
  return numbers;
}

}  // namespace

struct Sections::Report {
  std::int64_t completed = 0, generation = 0, updates = 0;
  bool updated = false, is_newcomer = false;

  std::string print() const {
    return text(completed, " ", generation, " ", updates, " ", updated ? 1 : 0, " ", is_newcomer ? 1 : 0);
  }
  static Report parse(const std::string& printed) {
    Report report;
    std::istringstream(printed) >> report.completed >> report.generation >> report.updates >> report.updated >>
        report.is_newcomer;
    return report;
  }
};

void Sections::run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish) {
  begin();
  may_have_begun_ = false;
  while (true) {
    Change change;
    try {
      auto numbers = call(act);
      const auto generation = member_.generation();
      finish(numbers);
      completed_.last = std::move(numbers);
      completed_.generation = generation;
      break;
    } catch (const std::exception& error) {
      change.lost = lost_or_rethrow(error);
    }
    if (recover(std::move(change), finish)) return;
  }
  ++completed_.count;
}

Sections::Numbers Sections::call(const std::function<Numbers()>& act) {
  struct Within {
    explicit Within(bool& is_in_one) : flag(is_in_one) { flag = true; }
    ~Within() { flag = false; }
    bool& flag;
  } const within(completed_.is_in_one);
  return act();
}

void Sections::begin() {
  if (!may_have_begun_) updated = false;
  steps_before_ = member_.steps() - (updated ? 1 : 0);
  updates_before_ = member_.updates() - (updated ? 1 : 0);
}

bool Sections::change(const Change& change) {
  if (completed_.generation != member_.generation()) return false;
  begin();
  recover(change, {});
  return true;
}

void Sections::join(const std::function<void()>& enter) {
  is_newcomer_ = true;
  Change change;
  try {
    enter();
    catch_up(0, {});
    return;
  } catch (const std::exception& error) {
    change.lost = lost_or_rethrow(error);
  }
  recover(std::move(change), {});
}

bool Sections::goes_on_behind(const std::exception& error) {
  auto lost = lost_in(error, member_.generation());
  if (!lost) return false;
  member_.on_loss(error);
  begin();
  recover({.lost = std::move(*lost)}, {});
  return true;
}

// Returns the members that are known to be lost, where the exception that is handled is a member's loss.
std::vector<int> Sections::lost_or_rethrow(const std::exception& error) {
  auto lost = lost_in(error, member_.generation());
  if (!lost) throw;
  member_.on_loss(error);
  return *lost;
}

// Regroups until no other loss disturbs it. Returns true where the section is completed by that.
bool Sections::recover(Change change, const std::function<void(const Numbers&)>& finish) {
  const int size_before = member_.size();
  const auto completed = completed_.count;
  while (true) {
    try {
      member_.regroup(change);
      if (!change.leaves) catch_up(size_before, finish);
      return completed_.count > completed;
    } catch (const std::exception& error) {
      change = {.lost = lost_or_rethrow(error), .leaves = change.leaves, .insists = true};
    }
  }
}

// Brings all to the same section, in the new generation.
void Sections::catch_up(int size_before, const std::function<void(const Numbers&)>& finish) {
  const auto updates = member_.updates();
  const Report mine{.completed = is_newcomer_ ? 0 : completed_.count,
                    .generation = completed_.generation,
                    .updates = updates,
                    .updated = updated || updates > updates_before_,
                    .is_newcomer = is_newcomer_};
  std::vector<Report> reports;
  for (const auto& printed : member_.all_gather(mine.print())) reports.push_back(Report::parse(printed));
  // Newcomers report that they have completed nothing.
  const auto first = std::max_element(reports.begin(), reports.end(),
                                      [](const auto& a, const auto& b) { return a.completed < b.completed; });
  const auto lacks = [&](const Report& report) { return !report.is_newcomer && report.completed < first->completed; };
  const bool is_behind = lacks(mine);
  share_update(reports, first->completed);
  if (std::any_of(reports.begin(), reports.end(), lacks)) {
    const auto numbers =
        numbers_in(member_.broadcast(bytes_of(completed_.last), static_cast<int>(first - reports.begin())));
    if (is_behind) {
      finish(numbers);
      completed_.last = numbers;
      completed_.generation = first->generation;
      ++completed_.count;  // before another loss, after which it would be finished twice
      begin();
    }
  }
  if (!is_newcomer_) {
    updated = std::any_of(reports.begin(), reports.end(),
                          [&](const auto& report) { return !lacks(report) && report.updated; });
    may_have_begun_ = may_have_begun_ || is_behind || !finish;
    member_.set_steps(steps_before_ + (updated ? 1 : 0));
    if (updated && member_.updates() == updates_before_) member_.skip_update();
  }
  share_all(reports);
  member_.on_regrouped(size_before, updated);
}

// Gives the section's update to members in the section that lack it, from one that has it. Members that have not
// completed the section before have all its updates: else the others could not have completed it.
void Sections::share_update(const std::vector<Report>& reports, std::int64_t section) {
  const auto is_there = [&](const Report& report) { return !report.is_newcomer && report.completed == section; };
  const auto with = std::max_element(reports.begin(), reports.end(), [&](const auto& a, const auto& b) {
    return std::pair(is_there(a), a.updates) < std::pair(is_there(b), b.updates);
  });
  const auto lacks = [&](const Report& report) { return is_there(report) && report.updates < with->updates; };
  if (std::none_of(reports.begin(), reports.end(), lacks)) return;
  const int root = static_cast<int>(with - reports.begin());
  const auto printed = member_.broadcast(root == member_.rank() ? member_.print_update() : "", root);
  if (lacks(reports[static_cast<std::size_t>(member_.rank())])) member_.take_update(printed);
}

// Returns the first row whose ranks all have the state. Where there is none it throws, on all alike.
int Sections::first_row_with_state(const std::vector<Report>& reports) const {
  const auto row_size = static_cast<std::size_t>(member_.row_size());
  for (std::size_t first = 0; first < reports.size(); first += row_size) {
    const auto begin = reports.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = begin + static_cast<std::ptrdiff_t>(row_size);
    if (std::none_of(begin, end, [](const Report& report) { return report.is_newcomer; }))
      return static_cast<int>(first / row_size);
  }
  throw ClusterError("no row of the mesh is left whose ranks all have the state of the training");
}

// Gives newcomers the state. All but their part of the model comes from a member that had completed most sections, and
// has done all that follows these. Their part comes from a member that has this part.
void Sections::share_all(const std::vector<Report>& reports) {
  const auto is_newcomer = [](const Report& report) { return report.is_newcomer; };
  if (std::none_of(reports.begin(), reports.end(), is_newcomer)) return;
  if (std::all_of(reports.begin(), reports.end(), is_newcomer)) {
    throw ClusterError("all workers that had the state of the training were lost before this one got it");
  }
  const auto with = std::max_element(reports.begin(), reports.end(), [](const auto& a, const auto& b) {
    return std::pair(!a.is_newcomer, a.completed) < std::pair(!b.is_newcomer, b.completed);
  });
  const int root = static_cast<int>(with - reports.begin());
  const bool sends = root == member_.rank();
  const auto completed = with->completed;
  const auto row = first_row_with_state(reports);
  const auto mine = [&] { return text(updated ? 1 : 0, " ", completed_.generation, "\n", member_.print_all()); };
  const auto state = member_.broadcast(sends ? mine() : "", root);
  const bool sends_part = row == member_.rank() / member_.row_size();
  const auto part = member_.broadcast_part(sends_part ? member_.print_part() : "", row);
  if (!is_newcomer_) return;
  const auto end = state.find('\n');
  std::istringstream(state.substr(0, end)) >> updated >> completed_.generation;
  member_.take_all(state.substr(end + 1), part);
  completed_.count = completed;
  is_newcomer_ = false;
  may_have_begun_ = true;
  begin();
}

}  // namespace lockstep::elastic
