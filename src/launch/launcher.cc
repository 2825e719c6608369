#include "launch/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>

#include "base/text.h"
#include "launch/guardian.h"
#include "launch/rank_process.h"
#include "lockstep/error.h"
#include "lockstep/store.h"

namespace lockstep {
namespace {

void check(const LaunchOptions& options) {
  const auto require = [](bool holds, const char* name, auto value, const char* allowed) {
    if (!holds) throw InvalidArgument(text("lockstep run: ", name, " is ", value, "; it must be ", allowed));
  };
  require(options.processes >= 1, "-n", options.processes, "at least 1");
  require(options.restarts >= 0, "--restarts", options.restarts, "0 or more");
  require(options.grace_seconds >= 0, "--grace", options.grace_seconds, "0 or more seconds");
  if (options.command.empty()) throw InvalidArgument("lockstep run: there is no program to run");
}

// SIGINT, SIGTERM and SIGCHLD as something to poll; ours again when it ends.
class Signals {
 public:
  Signals() {
    ::signal(SIGCHLD, SIG_DFL);  // where it is ignored there are no exit statuses
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action {};
      sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) sigaddset(&set, signal);  // nohup ignores SIGHUP
    }
    pthread_sigmask(SIG_BLOCK, &set, &before_);
    socket_ = FileDescriptor(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~Signals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  int descriptor() const { return socket_.get(); }

  // The next one that asks the job to end, or 0.
  int next() const {
    signalfd_siginfo info;
    while (read(socket_.get(), &info, sizeof info) == sizeof info) {
      if (info.ssi_signo != SIGCHLD) return static_cast<int>(info.ssi_signo);
    }
    return 0;
  }

 private:
  FileDescriptor socket_;
  sigset_t before_;
};

// One life of a job.
class Job {
 public:
  Job(const LaunchOptions& options, int restart, const Signals& signals, const Guardian& guardian, std::ostream& out,
      std::ostream& err)
      : options_(options), signals_(signals), guardian_(guardian), out_(out), err_(err) {
    for (int rank = 0; rank < options.processes; ++rank) {
      const std::map<std::string, std::string> environment{{"LOCKSTEP_RANK", std::to_string(rank)},
                                                           {"LOCKSTEP_SIZE", std::to_string(options.processes)},
                                                           {"LOCKSTEP_LOCAL_RANK", std::to_string(rank)},
                                                           {"LOCKSTEP_LOCAL_SIZE", std::to_string(options.processes)},
                                                           {"LOCKSTEP_HOST", "localhost"},
                                                           {"LOCKSTEP_STORE", store_.address()},
                                                           {"LOCKSTEP_RESTART", std::to_string(restart)}};
      const auto log = options.log_dir.empty() ? "" : text(options.log_dir, "/rank-", rank, ".log");
      ranks_.push_back(std::make_unique<RankProcess>(RankCommand{rank, options.command, environment, log}));
      guardian_.watch(ranks_.back()->pid());
    }
  }

  ~Job() {
    for (const auto& rank : ranks_) {
      rank->send(SIGKILL);
      while (!rank->ended() && !rank->reap()) usleep(1000);
      guardian_.forget(rank->pid());
    }
  }

  // Until all have ended; the exit status.
  int run() {
    while (running()) {
      wait();
      for (int signal = signals_.next(); signal != 0; signal = signals_.next()) pass_on(signal);
      read_all();
      notice_ends();
      if (kill_at_ && kill_at_->passed()) end_all(SIGKILL);
    }
    while (read_all()) {  // what they wrote at last
    }
    if (first_ != nullptr) explain(*first_);
    return asked_ != 0 ? 128 + asked_ : first_ != nullptr ? first_->status() : 0;
  }

  bool was_asked_to_end() const { return asked_ != 0; }

 private:
  bool running() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return !rank->ended(); });
  }

  void wait() {
    std::vector<pollfd> polls{{signals_.descriptor(), POLLIN, 0}};
    for (const auto& rank : ranks_) {
      polls.push_back({rank->descriptor(RankProcess::Stream::out), POLLIN, 0});
      polls.push_back({rank->descriptor(RankProcess::Stream::error), POLLIN, 0});
    }
    const auto left = kill_at_ ? std::chrono::ceil<std::chrono::milliseconds>(kill_at_->time() - Deadline::Clock::now())
                               : std::chrono::milliseconds(-1);
    poll(polls.data(), polls.size(),
         kill_at_ ? static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000)) : -1);
  }

  // A bounded part, so that signals have their turn. False where there was nothing.
  bool read_all() {
    bool any = false;
    for (const auto& rank : ranks_) {
      const auto print = [&](std::ostream& to) {
        return
            [&to, number = rank->rank()](const std::string& line) { to << "[" << number << "] " << line << std::endl; };
      };
      any |= rank->read(RankProcess::Stream::out, print(out_));
      any |= rank->read(RankProcess::Stream::error, print(err_));
    }
    return any;
  }

  // Of those that ended together, one that a signal ended is the cause: the others heard of its end.
  void notice_ends() {
    const RankProcess* failed = nullptr;
    for (const auto& rank : ranks_) {
      if (!rank->reap() || rank->status() == 0) continue;
      if (failed == nullptr || (failed->signal() == 0 && rank->signal() != 0)) failed = rank.get();
    }
    if (failed == nullptr || first_ != nullptr || asked_ != 0) return;
    first_ = failed;
    end_all(SIGTERM);
  }

  void pass_on(int signal) {
    const bool again = asked_ != 0;
    asked_ = signal;
    end_all(again ? SIGKILL : signal);
  }

  void end_all(int signal) {
    for (const auto& rank : ranks_) rank->send(signal);
    if (signal == SIGKILL) return kill_at_.reset();
    if (!kill_at_) kill_at_ = Deadline::after(std::chrono::duration<double>(options_.grace_seconds));
  }

  void explain(const RankProcess& rank) {
    err_ << "lockstep run: rank " << rank.rank() << " "
         << (rank.signal() != 0 ? text("was ended by signal ", rank.signal(), " (", strsignal(rank.signal()), ")")
                                : text("ended with status ", rank.status()));
    if (rank.signal() == 0 && !rank.last_words().empty()) err_ << ": " << rank.last_words();
    err_ << std::endl;
  }

  const LaunchOptions& options_;
  const Signals& signals_;
  const Guardian& guardian_;
  std::ostream& out_;
  std::ostream& err_;
  const Store store_ = Store::hold("127.0.0.1:0");
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  const RankProcess* first_ = nullptr;  // that failed
  int asked_ = 0;                       // the signal that this process got
  std::optional<Deadline> kill_at_;
};

}  // namespace

int launch(const LaunchOptions& options, std::ostream& out, std::ostream& err) {
  check(options);
  if (!options.log_dir.empty()) {
    std::error_code failed;
    std::filesystem::create_directories(options.log_dir, failed);
    if (failed) throw IoError(text("cannot make ", options.log_dir, ": ", failed.message()));
  }
  const Guardian guardian;
  const Signals signals;
  for (int restart = 0;; ++restart) {
    Job job(options, restart, signals, guardian, out, err);
    const int status = job.run();
    if (status == 0 || job.was_asked_to_end() || restart == options.restarts) return status;
    err << "lockstep run: restart " << restart + 1 << " of " << options.restarts << std::endl;
  }
}

}  // namespace lockstep
