// The ranks of an elastic job, generation by generation, each with a Session.
#pragma once

#include <array>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "base/timeouts.h"
#include "elastic/membership.h"
#include "front_ends/horovod/session.h"
#include "lockstep/horovod.h"
#include "train/signal_guard.h"

namespace lockstep::horovod {

// One thread.
class Generations {
 public:
  // A process that comes later waits here until the others take it in. Throws as Job and elastic::Candidate do, and
  // ClusterError where the training has ended.
  Generations(const Cluster& cluster, const InitOptions& options);

  // Null where the job is not elastic.
  static std::shared_ptr<Generations> current();
  static void set(std::shared_ptr<Generations> generations);

  // True where this process came later, and has not got the others' state yet.
  bool lacks_state() const { return lacks_state_; }
  void has_state() { lacks_state_ = false; }

  // Makes the process's session: of the ranks that there are. Collective.
  void begin();

  // Calls elastic::lost_in with this generation.
  std::optional<std::vector<int>> lost_in(const std::exception& error) const;

  // Calls `call` after each change of session, in the order of registration, until the returned handle is destroyed.
  std::shared_ptr<void> on_regroup(std::function<void()> call);

  // From here on, and until the training ends, newcomers are seen, and signals make this rank leave.
  void begin_training();
  void end_training();

  // `says`: this rank's numbers, to be summed. `changes`: true where to regroup; throws Interrupted where all end.
  std::array<double, 3> says();
  bool changes(const std::array<double, 3>& sums);

  // Goes on with the next generation of ranks, without the lost ones, and makes its session the process's. Does so
  // again where others are lost meanwhile. Throws Interrupted on a rank that leaves. Collective.
  void regroup(std::vector<int> lost);

 private:
  std::shared_ptr<Session> make_session();

  ::lockstep::elastic::JobMembership membership_;
  const InitOptions options_;
  const Timeouts timeouts_;
  bool lacks_state_ = false;
  using Calls = std::list<std::function<void()>>;
  const std::shared_ptr<Calls> on_regroup_ = std::make_shared<Calls>();  // handles may live longer than this
  std::optional<train::SignalGuard> signals_;
  std::unique_ptr<::lockstep::elastic::OpenTraining> training_;
  int signal_ = 0;  // that it said last that it has got
};

// The session of a Job's ranks.
std::shared_ptr<Session> session_of(const World& world, const Communicator& ranks);

}  // namespace lockstep::horovod
