// Communicator: the ranks that work together, as the parts of a program hold them. Torch-free.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/collective/group.h"

namespace lockstep {

inline constexpr double kDefaultTimeoutSeconds = 1800;

// A shared handle of a Group and of how long each call may take. After ranks were lost, `regroup` puts another Group in
// its place, in all copies of the handle. DistributedDataParallel then goes on with the ranks that remain; what was
// made of the old Group itself (split, convert_sync_batchnorm) has to be made anew.
//
// Collective calls are for one thread at a time, in the same order on all ranks, and throw what the Group throws; the
// others are for any thread, but none may run during `regroup`.
class Communicator {
 public:
  // Of this process alone.
  Communicator();

  // A Group is a communicator. `member` is what errors call a rank: "worker 2".
  Communicator(Group group, double timeout_seconds = kDefaultTimeoutSeconds,  // NOLINT(google-explicit-constructor)
               std::string member = "rank");

  int rank() const;
  int size() const;
  const Group& group() const;

  // How often `regroup` was called: memory that the Group allocated, and what else was made of it, is of one Group.
  std::int64_t regroups() const;

  // Of a call that begins now.
  Deadline deadline() const { return Deadline::after(std::chrono::duration<double>(timeout_seconds_)); }

  // The same ranks, now and later, with another timeout.
  Communicator with_timeout(double seconds) const;

  // Another Group with the same timeout, and errors that call its ranks alike.
  Communicator with_group(Group group) const;

  // From now on all copies have this Group. Between two steps: while no call runs.
  void regroup(Group group) const;

  // --- collective

  // Each becomes its sum over the ranks; the same bits on all.
  void sum(std::span<double> values) const;

  // Whether it holds on some rank, and on all.
  bool any(bool holds) const;
  bool all(bool holds) const;

  // What rank `root` gives, on all. Of any length.
  std::string broadcast(const std::string& bytes, int root = 0) const;

  // Every rank's bytes, in the order of ranks. Of any lengths.
  std::vector<std::string> all_gather(const std::string& mine) const;

  // The same on rank `root` alone; elsewhere nothing.
  std::vector<std::string> gather(const std::string& mine, int root) const;

  // Throws InvalidArgument on all ranks where their texts differ, with the first line that does: "the workers' `what`
  // differ: worker 0 has ..., worker 2 has ...".
  void check_all_agree(const std::string& what, const std::string& mine) const;

  // Acts on rank 0 while the others wait. What it throws there is an Error with the same text on the others.
  template <class Act>
  void run_on_rank_0(const Act& act) const;

  // --- not collective

  // Acts on this rank. Where that throws, the others' calls are aborted with the same text; but not for Interrupted,
  // which all ranks throw.
  template <class Act>
  void abort_on_error(const Act& act) const;
  void abort(const std::string& reason) const;  // does nothing for a rank alone

 private:
  std::vector<std::string> gather_at(const std::string& mine, std::optional<int> root) const;
  [[noreturn]] void throw_of_rank_0(const std::string& what) const;

  struct State;
  std::shared_ptr<State> state_;
  double timeout_seconds_ = kDefaultTimeoutSeconds;
};

template <class Act>
void Communicator::run_on_rank_0(const Act& act) const {
  std::exception_ptr mine;
  std::string failed;
  try {
    if (rank() == 0) act();
  } catch (const std::exception& error) {
    mine = std::current_exception();
    failed = error.what();
  }
  failed = broadcast(failed);
  if (mine) std::rethrow_exception(mine);
  if (!failed.empty()) throw_of_rank_0(failed);
}

template <class Act>
void Communicator::abort_on_error(const Act& act) const {
  try {
    act();
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    abort(error.what());
    throw;
  }
}

}  // namespace lockstep
