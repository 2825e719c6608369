#include "collective/mpi/process.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "collective/mpi/library.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::mpi {
namespace {

constexpr std::chrono::milliseconds kBetweenChecks(1);
constexpr std::chrono::seconds kForFailed(3);  // for MPI_Finalize where something failed

std::atomic<bool> failed{false};
std::atomic<int> in_mpi{0};  // threads that wait there for other ranks

// The thread that initialises MPI also finalises it, as the standard asks. Never freed: the thread may outlive main.
struct Lifetime {
  Mutex mutex;
  CondVar changed;
  bool ends LOCKSTEP_GUARDED_BY(mutex) = false;
  bool ended LOCKSTEP_GUARDED_BY(mutex) = false;
};

Lifetime& lifetime() {
  static auto* const one = new Lifetime;
  return *one;
}

// MPI_Finalize waits for the other processes, of which one may write a last checkpoint. If one of them ends badly,
// mpirun ends this one. MPI is not finalised under a thread that is left in it.
void end(int status, void* /*unused*/) {
  if (in_mpi > 0) return;
  auto& mine = lifetime();
  const bool waits_little = failed || status != 0;
  const auto until = waits_little ? Deadline::after(kForFailed) : Deadline::never();
  MutexLock lock(mine.mutex);
  mine.ends = true;
  mine.changed.notify_all();
  while (!mine.ended) {
    if (mine.changed.wait_until(mine.mutex, until.time()) != std::cv_status::timeout) continue;
    std::fflush(nullptr);
    _exit(status);  // nothing else may end under MPI's thread
  }
}

void wait_and_finalize() {
  auto& mine = lifetime();
  {
    MutexLock lock(mine.mutex);
    while (!mine.ends) mine.changed.wait(mine.mutex);
  }
  if (!has_ended()) library().MPI_Finalize();
  MutexLock lock(mine.mutex);
  mine.ended = true;
  mine.changed.notify_all();
}

int initialize() {
  const auto& constants = library().constants;
  int provided = 0;
  require(library().MPI_Init_thread(nullptr, nullptr, constants.thread_multiple, &provided), "MPI_Init_thread");
  require(library().MPI_Comm_set_errhandler(constants.world, constants.errors_return), "MPI_Comm_set_errhandler");
  return provided;
}

// Waits for the promise's value, and calls `check` meanwhile.
template <class Value>
void wait_for(std::future<Value>& value, const char* operation, const std::function<void()>& check, Deadline deadline) {
  while (value.wait_for(kBetweenChecks) != std::future_status::ready) {
    check();
    if (deadline.passed()) throw DeadlineExceeded(operation, deadline.waited());
  }
}

// Returns the level of threads that MPI gives.
int initialize_in_thread(const std::function<void()>& check, Deadline deadline) {
  auto started = std::make_shared<std::promise<int>>();
  auto level = started->get_future();
  std::thread([started] {
    try {
      started->set_value(initialize());
    } catch (...) {
      return started->set_exception(std::current_exception());
    }
    wait_and_finalize();
  }).detach();
  wait_for(level, "MPI_Init_thread", check, deadline);
  const int provided = level.get();
  on_exit(&end, nullptr);
  return provided;
}

void require_threads(int provided) {
  if (provided >= library().constants.thread_multiple) return;
  throw InvalidArgument(text("MPI gives threads the level ", provided, " of ", library().constants.thread_multiple,
                             ": the backend \"mpi\" calls it from several threads, and needs MPI_THREAD_MULTIPLE"));
}

}  // namespace

bool has_ended() {
  int flag = 0;
  library().MPI_Finalized(&flag);
  return flag != 0;
}

void mark_failed() { failed = true; }

int start(const std::function<void()>& check, Deadline deadline) {
  static Mutex mutex;
  static bool tried = false;
  MutexLock lock(mutex);
  if (has_ended()) throw InvalidArgument("MPI_Finalize was called: the backend \"mpi\" cannot be used any more");
  int begun = 0, provided = 0, rank = 0;
  require(library().MPI_Initialized(&begun), "MPI_Initialized");
  if (begun == 0) {
    if (std::exchange(tried, true)) throw Error("MPI_Init_thread, which was called before, has not returned");
    provided = initialize_in_thread(check, deadline);
  } else {
    require(library().MPI_Query_thread(&provided), "MPI_Query_thread");
  }
  require_threads(provided);
  require(library().MPI_Comm_rank(library().constants.world, &rank), "MPI_Comm_rank");
  return rank;
}

void run_bounded(const char* operation, std::function<void()> act, const std::function<void()>& check,
                 Deadline deadline) {
  struct InMpi {
    InMpi() { ++in_mpi; }
    ~InMpi() { --in_mpi; }
  };
  std::packaged_task<void()> task([act = std::move(act)] {
    const InMpi here;
    act();
  });
  auto done = task.get_future();
  std::thread(std::move(task)).detach();
  wait_for(done, operation, check, deadline);
  done.get();
}

}  // namespace lockstep::collective::mpi
