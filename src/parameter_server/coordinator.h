// The chief's end: gives out the steps of a fit, and collects what workers report of them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "parameter_server/service.h"
#include "parameter_server/step_queue.h"
#include "parameter_server/step_schedule.h"

namespace lockstep::parameter_server {

// The values that the chief's model has beside the servers' variables, as a worker gets them. Both numbers tell which
// values a worker has: a chief that was started again counts its changes anew.
struct ChiefState {
  std::int64_t chief = 0;    // the chief that has these values: Assignment's
  std::int64_t changes = 0;  // of the values in this fit: Assignment's `state`
  std::string values = {};   // frozen parameters, buffers and the seed (ModelState::beside_servers)

  // Both numbers in a line, then the values. `parse` throws DataError for any other text.
  std::string print() const;
  static ChiefState parse(const std::string& printed);
};

// Any thread calls what ChiefService has; the chief's own thread the rest.
class Coordinator final : public ChiefService {
 public:
  // `reconnect_seconds`: how long a step may wait while no worker is connected. `chief`: the number of this chief among
  // those of the job, of which each was started when the one before was lost. `replicas_of_shards`: above 1, a server
  // that is started again lacks no updates.
  Coordinator(int workers, double reconnect_seconds, std::int64_t chief = 1, int replicas_of_shards = 1)
      : workers_(workers),
        reconnect_seconds_(reconnect_seconds),
        replicas_of_shards_(replicas_of_shards),
        steps_(std::make_shared<StepQueue>(workers, reconnect_seconds, chief)),
        chief_(chief) {}

  // A chief that restores a checkpoint takes a new number too: what was computed before it is ignored.
  void set_chief(std::int64_t chief);

  // --- the chief's thread

  // The chief's program makes call number `call`, and, after end_program, no more.
  void begin_call(std::int64_t call, const std::string& name);
  void end_program(bool failed);

  // Begins the fit that is call number `call`, of a model. `plan`, `state`: as ChiefConnection::start's. `uncounted`:
  // the results of steps before it, which wait_for_step returns first.
  void begin(std::int64_t call, std::int64_t model, const UpdateMode& mode, std::string plan = "",
             std::string state = "", const std::vector<std::vector<double>>& uncounted = {});

  // Gives out `steps` more, or, where that is not known (below 0), as many as the workers have batches for. The first
  // one's batch is number `index` of the data's epoch.
  void open(std::int64_t epoch, std::int64_t index, std::int64_t steps);

  // The learning rate of the steps that are given out from now on; nothing: the optimizer's own.
  void set_learning_rate(std::optional<double> rate);

  // Gives out no more steps than those that workers have begun.
  void stop();

  // True where wait_for_step returns, or throws, at once; waits for that until `look`. `deadline`: wait_for_step's.
  bool step_is_ready(Deadline look, Deadline deadline);

  struct FinishedStep {
    std::int64_t step = 0;
    std::vector<double> results;  // of its parts, added in their order

    // Steps of other workers that finished from when a worker got this one until it had finished the step; of several
    // parts the largest. So many updates may lie between the values that it read and those that it updated.
    std::int64_t staleness = 0;
  };

  // The next step that has finished; nothing once all have. Throws InvalidArgument with a worker's text where its step
  // failed, ClusterError where all workers have gone, and DeadlineExceeded.
  std::optional<FinishedStep> wait_for_step(Deadline deadline);

  // The buffers' values that workers have reported in the fit that runs: by worker, then by buffer. Empty where no fit
  // runs.
  std::map<int, std::map<int, std::string>> buffers();

  // Forgets the reports of buffers so far: the chief has other values.
  void forget_buffers();

  // The chief's state has changed in a fit that runs: workers get this one before their next task.
  void change_state(std::string state);

  // Steps that have finished.
  struct Finished {
    std::int64_t end = 0;                             // all steps below this one
    std::vector<std::vector<double>> uncounted = {};  // of which nobody has waited for these
  };

  // For a checkpoint of a model: until `release`, workers begin no step. Returns the end of those that they have begun.
  std::int64_t hold(std::int64_t model);
  void release();

  // Waits until all steps below `end` have finished, or, where the data ended before, those that there are. Throws as
  // wait_for_step.
  Finished wait_for_begun(std::int64_t model, std::int64_t end, Deadline deadline);

  // A checkpoint of the model has the steps below `end`: a server that is started again has these.
  void tell_saved(std::int64_t model, std::int64_t end);

  // Throws InvalidArgument while workers compute steps of the model.
  void require_idle(std::int64_t model);

  // The model's next step is number `step`. Throws as require_idle.
  void resume(std::int64_t model, const UpdateMode& mode, std::int64_t step);

  // True where the model has had a fit, was resumed, or is trained by a program's steps.
  bool knows(std::int64_t model);
  void set_trained_by_program(std::int64_t model);

  // Begins call number `call`, in which workers compute what is scheduled in `steps`.
  void begin_steps(std::int64_t call);
  const std::shared_ptr<StepQueue>& steps() const { return steps_; }

  // Ends the call: workers that ask for work are told, and `outcome` is what others get as its result.
  void end(std::int64_t call, std::string outcome);

  // True where the process has joined, and has not left.
  bool is_present(const std::string& process) const;

  // Waits until so many processes have joined; false at the deadline.
  bool wait_for_joining(int processes, Deadline deadline);

  // Waits until all processes whose names do not begin with `but` have left; false at the deadline.
  bool wait_for_leaving(const std::string& but, Deadline deadline);

  // Ends all waits, now and later, with Aborted: the process is ending.
  void close();

  // --- ChiefService
  bool has_begun(std::int64_t call, const std::string& name, Deadline deadline) override;
  std::optional<std::string> start(std::int64_t call, int worker, const std::string& plan, Deadline deadline) override;
  Assignment next(std::int64_t call, int worker, const std::optional<Report>& report, Deadline deadline) override;
  std::optional<std::string> outcome(std::int64_t call, Deadline deadline) override;
  void join(const Process& process) override;
  void leave(const Process& process) override;

 private:
  // The steps of one model, over all its fits.
  struct Training {
    explicit Training(const UpdateMode& mode) : schedule(mode) {}
    struct Batch {
      std::int64_t epoch = 0, index = 0;
    };
    StepSchedule schedule;
    std::map<std::int64_t, Batch> opened;  // [the first step of each `open`]
    std::optional<std::int64_t> saved;     // steps that the last checkpoint has
  };
  void take(int worker, const Report& report) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void require_worker(int worker) const;
  void collect(int worker, const Report& report) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  std::optional<Assignment> assign(int worker) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  bool has_steps(std::int64_t call);
  bool has_workers() const LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  Deadline until_reconnected() const;
  void wait_for_workers(Deadline deadline, const char* for_what)
      LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  bool wait(Deadline deadline) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));

  const int workers_;
  const double reconnect_seconds_;
  const int replicas_of_shards_;
  const std::shared_ptr<StepQueue> steps_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::int64_t chief_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t call_ LOCKSTEP_GUARDED_BY(mutex_) = -1;  // the fit that runs, or ran last
  bool over_ LOCKSTEP_GUARDED_BY(mutex_) = true;
  std::optional<std::int64_t> steps_call_ LOCKSTEP_GUARDED_BY(mutex_);  // that `steps_` is open for
  bool closed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::map<std::int64_t, Training> trainings_ LOCKSTEP_GUARDED_BY(mutex_);  // [model]
  Training* training_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;                // of the fit; null before the first
  std::map<std::int64_t, std::optional<std::int64_t>> trained_by_program_
      LOCKSTEP_GUARDED_BY(mutex_);  // [model] `saved`
  std::optional<double> learning_rate_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<Task, FinishedStep> parts_ LOCKSTEP_GUARDED_BY(mutex_);           // of steps that have not finished
  std::map<int, std::int64_t> finished_before_ LOCKSTEP_GUARDED_BY(mutex_);  // [worker] when it got its task
  Deadline reconnected_by_ LOCKSTEP_GUARDED_BY(mutex_) = Deadline::never();  // while no worker is connected
  std::deque<FinishedStep> finished_ LOCKSTEP_GUARDED_BY(mutex_);            // that nobody has waited for
  bool held_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::string failure_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string plan_ LOCKSTEP_GUARDED_BY(mutex_), state_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t state_changes_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // in this fit
  std::map<int, std::map<int, std::string>> buffers_ LOCKSTEP_GUARDED_BY(mutex_);
  std::multiset<std::string> present_ LOCKSTEP_GUARDED_BY(mutex_);         // names of processes
  std::set<int> leaving_ LOCKSTEP_GUARDED_BY(mutex_);                      // workers that are about to go
  std::set<std::string> joined_ LOCKSTEP_GUARDED_BY(mutex_);               // that were ever present
  std::map<std::int64_t, std::string> calls_ LOCKSTEP_GUARDED_BY(mutex_);  // names of those that the chief has begun
  std::string different_calls_
      LOCKSTEP_GUARDED_BY(mutex_);  // how another process's call differs from the last of these
  bool program_ended_ LOCKSTEP_GUARDED_BY(mutex_) = false, program_failed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::map<std::int64_t, std::string> outcomes_ LOCKSTEP_GUARDED_BY(mutex_);  // [call]
};

}  // namespace lockstep::parameter_server
