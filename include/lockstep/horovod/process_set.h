// Process sets: some of the ranks, which make operations beside those of all. Follows horovod.torch's ProcessSet.
#pragma once

#include <memory>
#include <vector>

namespace lockstep::horovod {

class Session;

// A shared handle. An operation that gets a process set is made by the ranks of the set, in one order; other ranks go
// on meanwhile. Results have the order of these ranks, and root_rank is still one of all ranks. Operations throw
// InvalidArgument in a rank that the set does not include, after `shutdown`, and when an elastic job goes on with other
// ranks: make the set anew then. The set must live until its operations have ended. `join` is for all ranks, and not
// with optimizers of sets.
class ProcessSet {
 public:
  ProcessSet() = default;  // all ranks, whichever they are at a call

  bool is_all() const { return is_global_; }
  bool included() const;           // this rank
  std::vector<int> ranks() const;  // ascending: ranks among all
  int size() const;
  int rank() const;  // of this process among them; throws InvalidArgument where it is not included

 private:
  friend ProcessSet add_process_set(const std::vector<int>& ranks);
  friend struct InProcessSet;

  std::vector<int> ranks_;
  std::weak_ptr<Session> of_;         // all ranks', when the set was made
  std::shared_ptr<Session> session_;  // null: this rank is not included
  bool is_global_ = true;
};

inline const ProcessSet global_process_set;

// Collective over all ranks, which give the same ranks in any order. Throws InvalidArgument on all for a rank that does
// not exist or is given twice, for none, and where the ranks' lists differ.
ProcessSet add_process_set(const std::vector<int>& ranks);

}  // namespace lockstep::horovod
