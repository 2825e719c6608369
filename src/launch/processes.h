// One life of a job: its processes are started together, watched, and ended together.
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "launch/guardian.h"
#include "launch/member.h"
#include "launch/orders.h"
#include "launch/signals.h"
#include "lockstep/deadline.h"

namespace lockstep {

class JobProcesses {
 public:
  // What it is run with, and outlives it.
  struct Surroundings {
    const Signals& signals;
    const Guardian& guardian;
    std::ostream& out;
    std::ostream& err;
    Orders* orders = nullptr;                       // where another launcher started this one
    std::function<void(int rank)> ended_well = {};  // a rank has ended with status 0
  };

  // Starts them. Throws ClusterError and IoError; then none is left.
  JobProcesses(const std::vector<MemberCommand>& members, double grace_seconds, const Surroundings& surroundings);

  // Ends those that still run.
  ~JobProcesses();

  // Until all have ended; the exit status. kLogsIncomplete where all ended well, but a log file could not be written.
  static constexpr int kLogsIncomplete = 74;  // EX_IOERR of sysexits.h
  int run();

  bool failed() const { return first_ != nullptr; }
  bool was_asked_to_end() const { return asked_ != 0; }

 private:
  bool running() const;
  void wait();
  void follow_orders();
  bool read_all();
  bool read(Member& member);
  bool reap(Member& member);
  void tell_of_log(const Member& member);
  void print(Member& member, std::ostream& to, const std::string& line);
  void notice_ends();
  void fails_first(Member& member);
  void end_others();
  void pass_on(int signal);
  void set_out_to_kill();
  void kill_what_is_left();
  std::string explanation(const Member& member) const;

  const double grace_seconds_;
  const Surroundings surroundings_;
  std::vector<std::unique_ptr<Member>> members_;
  const Member* first_ = nullptr;  // that failed
  std::string report_;             // of it, by another host's launcher
  std::set<const Member*> without_log_;
  bool nobody_reads_ = false;
  int asked_ = 0;              // the signal that asked the job to end
  bool ending_ = false;        // members are being ended: how they end is no failure of theirs
  bool told_to_kill_ = false;  // those that take orders
  std::optional<Deadline> kill_at_;
  std::jthread signs_of_life_;  // last: it ends before the members do
};

}  // namespace lockstep
