// How the loops of a job's members stay in step although members are lost, leave and join.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "elastic/next_generation.h"

namespace lockstep::elastic {

// A member of the job, and what it trains. Collective calls throw PeerLost, DeadlineExceeded with ranks, or Aborted
// where another member is lost.
class Member {
 public:
  virtual ~Member() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::int64_t generation() const = 0;  // of which it is a member
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  virtual std::string broadcast(const std::string& bytes, int root) = 0;

  // Where several members have a copy of the model together (rows.h): how many, and what the members of row `row` give
  // to those that have the same part.
  virtual int row_size() const { return 1; }
  virtual std::string broadcast_part(const std::string& bytes, int row) { return broadcast(bytes, row); }

  // Makes the next generation. Throws as next_generation, and as a collective call where another member is lost
  // meanwhile; then this one may be of the next generation already.
  virtual void regroup(const Change& change) = 0;

  // Of the training that it is in.
  virtual std::int64_t steps() const = 0;    // begun
  virtual std::int64_t updates() const = 0;  // applied
  virtual void set_steps(std::int64_t steps) = 0;

  // What an update changes, and taking it from a member that has one more.
  virtual std::string print_update() = 0;
  virtual void take_update(const std::string& printed) = 0;

  // All that a newcomer needs to go on as this member, between sections; and what it needs of one with the same part of
  // a model.
  virtual std::string print_all() = 0;
  virtual std::string print_part() { return {}; }
  virtual void take_all(const std::string& printed, const std::string& printed_part) = 0;

  // Another member is lost; the error says which, and how. What this throws ends the call.
  virtual void on_loss(const std::exception& error) = 0;

  // All have regrouped, and are at the same section. `updated`: that is not completed, but has its update.
  virtual void on_regrouped(int size_before, bool updated) = 0;
};

// A training is a sequence of sections that all members complete together: a step, an evaluation, an agreement. When
// one is lost, some of the others may have completed the section in which that happened, and some not; and of those in
// a step, some may have made its update. After they have regrouped, what one of them has completed the others take from
// it, and what none has is done again. Since gradients are applied only when all sums are there, no step has to be
// taken back. A newcomer gets the state of one that is at the same section.
//
// One thread.
class Sections {
 public:
  using Numbers = std::vector<double>;

  // Those that a process has completed, of all its trainings: one member may be in the last section of a training when
  // another one is in the first of the next.
  struct Completed {
    std::int64_t count = 0;
    Numbers last;                 // of the last one
    std::int64_t generation = 0;  // in which these were agreed on
    bool is_in_one = false;       // its act() runs
  };

  Sections(Member& member, Completed& completed) : member_(member), completed_(completed) {}

  // A section: act() is collective and returns numbers that are equal on all members; finish(numbers) is not
  // collective, and completes the section. Where act() fails since a member was lost, it is called again on those that
  // remain; or only `finish`, with the numbers of one that has completed the section.
  void run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish);

  // Whether the section's update of the model has been made, here or on another member, from which this one has got the
  // state then. Set by act(); false when a section begins, but for a newcomer's first one, which others may have begun.
  bool updated = false;

  // Changes the membership behind a section, in which all members agreed on it; a member that leaves has left then.
  // False, and nothing is done, where they have regrouped since that agreement: they will agree on it again.
  bool change(const Change& change);

  // A newcomer's first call: gets the state from the others, with which enter() makes a group.
  void join(const std::function<void()>& enter);

  // After an exception outside of a section, in what is not done again: where it is the loss of a member, goes on
  // behind it. Else false.
  bool goes_on_behind(const std::exception& error);

 private:
  struct Report;  // of a member, on where it is
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
  bool is_newcomer_ = false;       // without the state
  bool has_joined_ = false;        // and has begun no section
  std::int64_t steps_before_ = 0;  // the section
  std::int64_t updates_before_ = 0;
};

}  // namespace lockstep::elastic
