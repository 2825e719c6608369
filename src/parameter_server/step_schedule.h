// The tasks of each worker, and the steps that are done.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>

#include "parameter_server/applied_steps.h"
#include "parameter_server/push.h"

namespace lockstep::parameter_server {

// A state machine of the chief's: it knows of no time, network or thread. Two workers may compute one task, where the
// first was thought lost; it is finished once.
class StepSchedule {
 public:
  // The first `finished` steps are finished.
  explicit StepSchedule(const UpdateMode& mode, std::int64_t finished = 0)
      : mode_(mode), scheduled_(finished), end_of_given_(finished), finished_(std::span(&finished, 1)) {
    check(mode);
  }

  // Adds steps. Their numbers continue those before, from 0 on.
  void add(std::int64_t steps) { scheduled_ += steps; }

  // Takes back the steps from `step` on, of which no worker computes one; their numbers are given out again. Throws
  // InvalidArgument where one was finished.
  void end_before(std::int64_t step);

  // The number after the last step that a worker ever had, but for those that were taken back.
  std::int64_t end_of_begun() const { return end_of_given_; }

  // True where the worker has the task.
  bool has(int worker, Task task) const;

  // Gives up all steps that have not finished. No number that a worker ever had is given out again: a server may have
  // applied it.
  void abandon();

  // Returns the worker's next task: the one it has, or the first that nobody has; nothing where there is none, or it
  // must wait for others. Without `may_begin` only tasks of steps of which a worker has had one.
  std::optional<Task> next(int worker, bool may_begin = true);

  // The worker's pushes of the task are acknowledged by all servers. Whether it is finished by that: then the worker's
  // results count, else another's did, or the step did not need it, or was taken back. Throws InvalidArgument for a
  // task that was never scheduled.
  bool finish(int worker, Task task);

  // The worker is lost: another one gets its task.
  void lose(int worker);

  // The worker's update of the task reached some servers and not all: the task is given out again, for the others to
  // get it too. False, and nothing changes, for the kMostTries-th time.
  bool give_again(int worker, Task task);
  static constexpr int kMostTries = 3;

  const UpdateMode& mode() const { return mode_; }
  std::int64_t scheduled() const { return scheduled_; }
  const AppliedSteps& finished() const { return finished_; }
  bool all_finished() const { return finished_.count() == scheduled_; }

 private:
  bool must_wait(int worker) const;
  bool is_finished(Task task) const;
  bool is_given(Task task) const;
  std::int64_t end_of_open_steps() const;  // after the last one that may be computed now
  std::optional<Task> first_free() const;

  UpdateMode mode_;
  std::int64_t scheduled_ = 0;
  std::int64_t end_of_given_ = 0;  // after the last step that a worker ever had
  AppliedSteps finished_;
  std::set<int> finished_parts_;          // of the step that is computed together
  std::map<int, Task> given_;             // [worker]: all differ
  std::map<std::int64_t, int> tries_;     // [step]: that reached some servers only
  std::map<int, std::int64_t> steps_by_;  // [worker]: finished, counted from the slowest's number when it joined
};

}  // namespace lockstep::parameter_server
