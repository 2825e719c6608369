// Communicator: a Group and its timeout; the Group can be replaced after ranks were lost. Torch-free.
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

// A shared handle of a Group and of the timeout of each call. After ranks were lost, `regroup` replaces the Group in
// all copies of the handle. DistributedDataParallel then continues with the remaining ranks; what was made from the old
// Group itself (split, convert_sync_batchnorm) must be made anew.
//
// Collective calls: one thread at a time, in the same order on all ranks; they throw what the Group throws. Other
// calls: any thread, but none may run during `regroup`.
class Communicator {
 public:
  // A Communicator of this process alone.
  Communicator();

  // A Group converts to a Communicator. `timeout_seconds`: how long a call waits for the other ranks. `member`: the
  // word for a rank in errors, as in "worker 2".
  Communicator(Group group, double timeout_seconds = kDefaultTimeoutSeconds,  // NOLINT(google-explicit-constructor)
               std::string member = "rank");

  int rank() const;
  int size() const;
  const Group& group() const;

  // Counts the calls of `regroup`. Memory that a Group allocated, and anything else made from a Group, belongs to that
  // Group alone.
  std::int64_t regroups() const;

  double timeout_seconds() const { return timeout_seconds_; }

  // The deadline of a call that begins now.
  Deadline deadline() const { return Deadline::after(std::chrono::duration<double>(timeout_seconds_)); }

  // Returns these ranks, now and later, with another timeout.
  Communicator with_timeout(double seconds) const;

  // Returns these ranks, now and later, for collective calls of one purpose. Ranks that call the functions below for
  // another purpose get InvalidArgument. Calls of `group()` itself tell their own purposes.
  Communicator with_purpose(Purpose purpose) const;
  Purpose purpose() const { return purpose_; }

  // Returns another Group with this timeout and this word for a rank in errors.
  Communicator with_group(Group group) const;

  // Replaces the Group in all copies. Call it between two steps, while no call runs.
  void regroup(Group group) const;

  // --- collective

  // Each value becomes its sum over the ranks; all get equal bits.
  void sum(std::span<double> values) const;

  // any: whether `holds` is true on at least one rank. all: on every rank.
  bool any(bool holds) const;
  bool all(bool holds) const;

  // Returns rank `root`'s bytes on all ranks. Any length.
  std::string broadcast(const std::string& bytes, int root = 0) const;

  // Every rank's bytes, in the order of ranks. Of any lengths.
  std::vector<std::string> all_gather(const std::string& mine) const;

  // Returns every rank's bytes on rank `root`, and nothing elsewhere.
  std::vector<std::string> gather(const std::string& mine, int root) const;

  // Throws InvalidArgument on all ranks where their texts differ. Its text has the first line that differs: "the
  // workers' `what` differ: worker 0 has ..., worker 2 has ...".
  void check_all_agree(const std::string& what, const std::string& mine) const;

  // Calls `act` on rank 0 while the others wait. The others throw an exception of `act` as an Error with its text, or
  // as IoError where it is one.
  template <class Act>
  void run_on_rank_0(const Act& act) const;

  // --- not collective

  // Calls `act` on this rank. Where `act` throws, aborts the others' calls with the exception's text; but not for
  // Interrupted, which all ranks throw.
  template <class Act>
  void abort_on_error(const Act& act) const;
  void abort(const std::string& reason) const;  // does nothing for a rank alone

 private:
  std::vector<std::string> gather_at(const std::string& mine, std::optional<int> root) const;
  void run(Call call) const;
  [[noreturn]] void throw_of_rank_0(const std::string& what, bool is_io_error) const;

  struct State;
  std::shared_ptr<State> state_;
  double timeout_seconds_ = kDefaultTimeoutSeconds;
  Purpose purpose_;
};

template <class Act>
void Communicator::run_on_rank_0(const Act& act) const {
  constexpr char kIoError = 'i', kOther = 'o';
  std::exception_ptr mine;
  std::string failed;  // its kind, and what it says
  try {
    if (rank() == 0) act();
  } catch (const std::exception& error) {
    mine = std::current_exception();
    failed = (dynamic_cast<const IoError*>(&error) != nullptr ? kIoError : kOther) + std::string(error.what());
  }
  failed = broadcast(failed);
  if (mine) std::rethrow_exception(mine);
  if (!failed.empty()) throw_of_rank_0(failed.substr(1), failed[0] == kIoError);
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
