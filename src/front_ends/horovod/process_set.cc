#include "lockstep/horovod/process_set.h"

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "front_ends/horovod/in_process_set.h"
#include "lockstep/base/error.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {

bool ProcessSet::included() const { return is_global_ || session_ != nullptr; }

std::vector<int> ProcessSet::ranks() const {
  if (!is_global_) return ranks_;
  std::vector<int> all(static_cast<std::size_t>(horovod::size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

int ProcessSet::size() const { return is_global_ ? horovod::size() : static_cast<int>(ranks_.size()); }

int ProcessSet::rank() const {
  const InProcessSet in_set(*this);
  return Session::current()->rank();
}

ProcessSet add_process_set(const std::vector<int>& ranks) {
  const auto session = Session::current();
  auto sorted = ranks;
  std::ranges::sort(sorted);
  require(!sorted.empty(), "add_process_set: the number of ranks", sorted.size(), "1 or more");
  require(sorted.front() >= 0 && sorted.back() < session->size(), "add_process_set: a rank",
          sorted.front() < 0 ? sorted.front() : sorted.back(), "from 0 to ", session->size() - 1);
  const auto twice = std::ranges::adjacent_find(sorted);
  if (twice != sorted.end()) throw InvalidArgument(text("add_process_set: rank ", *twice, " is given twice"));
  ProcessSet set;
  set.session_ = session->among(sorted, text("add_process_set of ranks ", lockstep::join(sorted)));
  set.of_ = session;
  set.ranks_ = sorted;
  set.is_global_ = false;
  return set;
}

InProcessSet::InProcessSet(const ProcessSet& set) {
  if (set.is_global_) return;
  const auto now = Session::current();
  if (now != set.session_ && now != set.of_.lock()) {  // the first within a call of the set
    throw InvalidArgument(
        text("the process set of ranks ", lockstep::join(set.ranks_),
             " was made for ranks that are no more, before init or a change of an elastic job: make it "
             "anew"));
  }
  if (!set.session_) {
    throw InvalidArgument(
        text("this rank, ", horovod::rank(), ", is not in the process set of ranks ", lockstep::join(set.ranks_)));
  }
  use_.emplace(set.session_);
}

int InProcessSet::root_of(const std::string& caller, const ProcessSet& set, int root_rank) {
  if (set.is_global_) return root_rank;
  const auto found = std::ranges::find(set.ranks_, root_rank);
  if (found == set.ranks_.end()) {
    throw InvalidArgument(text(caller, ": root_rank is ", root_rank, "; it must be one of the process set's ranks ",
                               lockstep::join(set.ranks_)));
  }
  return static_cast<int>(found - set.ranks_.begin());
}

}  // namespace lockstep::horovod
