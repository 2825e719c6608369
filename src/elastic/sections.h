// How the loops of a job's members stay in step although members are lost, leave and join.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "elastic/next_generation.h"

namespace lockstep::elastic {

// A member of the job, and the training that it is in. Collective calls throw PeerLost, DeadlineExceeded with ranks, or
// Aborted where another member is lost.
class Member {
 public:
  virtual ~Member() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::int64_t generation() const = 0;  // that it belongs to
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  virtual std::string broadcast(const std::string& bytes, int root) = 0;

  // Several members may share a copy of the model (members.h): `row_size` says how many. `broadcast_part` gives the
  // bytes of each member of row `row` to the members with the same part.
  virtual int row_size() const { return 1; }
  virtual std::string broadcast_part(const std::string& bytes, int row) { return broadcast(bytes, row); }

  // Makes the next generation. Throws as next_generation, and as a collective call where another member is lost
  // meanwhile: this member may be of the next generation already then.
  virtual void regroup(const Change& change) = 0;

  // Counts of the training that the member is in.
  virtual std::int64_t steps() const = 0;    // begun
  virtual std::int64_t updates() const = 0;  // applied
  virtual void set_steps(std::int64_t steps) = 0;

  // Print what an update changes, and take it from a member that has made one more update.
  virtual std::string print_update() = 0;
  virtual void take_update(const std::string& printed) = 0;

  // Called where others have made the section's update and this member has not, nor has it taken the update. For
  // members that each make updates of their own: counts one, and goes on without.
  virtual void skip_update() {}

  // Print the state with which a newcomer goes on as this member, between sections. print_part: the state of this
  // member's part of a model, for a newcomer with the same part.
  virtual std::string print_all() = 0;
  virtual std::string print_part() { return {}; }
  virtual void take_all(const std::string& printed, const std::string& printed_part) = 0;

  // Called where another member is lost; the error says which, and how. An exception of this function ends the call.
  virtual void on_loss(const std::exception& error) = 0;

  // Called when all have regrouped, and are at the same section. `updated`: it has its update, but is not completed.
  virtual void on_regrouped(int size_before, bool updated) = 0;
};

// A training is a sequence of sections that all members complete together: a step, an evaluation, an agreement. When a
// member is lost in a section, others may have completed the section or not; in a step, some may have made its update.
// The others regroup. Then members take from each other what one has completed, and repeat what none has. No step has
// to be taken back, since gradients are applied only when all sums are there. A newcomer gets the state of a member at
// its section.
//
// One thread.
class Sections {
 public:
  using Numbers = std::vector<double>;

  // The sections that a process has completed, in all its trainings: members may be one section apart, also where a
  // training ends and the next begins.
  struct Completed {
    std::int64_t count = 0;
    Numbers last;                 // those of the last section
    std::int64_t generation = 0;  // in which these numbers were agreed on
    bool is_in_one = false;       // the act() of a section runs
  };

  Sections(Member& member, Completed& completed) : member_(member), completed_(completed) {}

  // Makes a section: act() is collective and returns numbers that are equal on all members; finish(numbers) is not
  // collective, and completes the section. Where a member is lost in act(), the members that remain call it again; or
  // only `finish`, with the numbers of a member that has completed the section.
  void run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish);

  // True once the section's update of the model is made: here, or on another member whose state this one then got. Set
  // by act(). False when a section begins that others cannot have begun: not so after a newcomer has come, or members
  // have regrouped between sections.
  bool updated = false;

  // Changes the membership after a section in which all members agreed on it; then a member that leaves has left.
  // Returns false, and does nothing, where members have regrouped since they agreed: they will agree on it again.
  bool change(const Change& change);

  // Gets the state from the others, in a group that enter() makes. This is a newcomer's first call.
  void join(const std::function<void()>& enter);

  // Call it after an exception outside of sections, in work that is not repeated. Where the exception is the loss of a
  // member, the training goes on after that work, and it returns true; else false.
  bool goes_on_behind(const std::exception& error);

 private:
  struct Report;  // a member's, on where it is
  Numbers call(const std::function<Numbers()>& act);
  void begin();
  std::vector<int> lost_or_rethrow(const std::exception& error);
  bool recover(Change change, const std::function<void(const Numbers&)>& finish);
  void catch_up(int size_before, const std::function<void(const Numbers&)>& finish);
  void share_update(const std::vector<Report>& reports, std::int64_t section);
  void share_all(const std::vector<Report>& reports);
  int first_row_with_state(const std::vector<Report>& reports) const;

  Member& member_;
  Completed& completed_;
  bool is_newcomer_ = false;     // it has no state yet
  bool may_have_begun_ = false;  // others may have begun the next section, and `updated` says whether it has its update
  std::int64_t steps_before_ = 0;  // before the section
  std::int64_t updates_before_ = 0;
};

}  // namespace lockstep::elastic
