#include "collective/gpus/nccl.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::gpus {
namespace {

constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t

Nccl load_nccl() {
  const char* const given = std::getenv("LOCKSTEP_NCCL_LIBRARY");
  const std::array names{given == nullptr ? "libnccl.so.2" : given};
  const OpenedLibrary library(text("NCCL (", names[0], ")"), names, "there is no NCCL");
  Nccl found;
#define LOCKSTEP_FIND(name, ...) library.find(#name, found.name);
  LOCKSTEP_NCCL_FUNCTIONS(LOCKSTEP_FIND)
#undef LOCKSTEP_FIND
  found.ncclGetVersion(&found.version);
  if (found.version < kOldestNccl) {
    throw InvalidArgument(text("NCCL (", names[0], ") has version ", name_of_version(found.version), "; it must be ",
                               name_of_version(kOldestNccl), " or newer"));
  }
  return found;
}

std::string words_for(int result, NcclHandle communicator) {
  const std::string why = nccl().ncclGetLastError(communicator);
  return text(nccl().ncclGetErrorString(result), why.empty() ? "" : ": ", why);
}

}  // namespace

std::string name_of_version(int version) { return text(version / 10000, ".", version / 100 % 100, ".", version % 100); }

const Nccl& nccl() {
  static const Nccl loaded = load_nccl();
  return loaded;
}

void require_nccl(int result, const char* function, NcclHandle communicator) {
  if (result == kSuccess || result == kInProgress) return;
  throw Error(text(function, ": ", words_for(result, communicator)));
}

int dtype_for_nccl(DType dtype) {
  constexpr std::array kNumbers{7, 8, 6, 9, 2, 4, 1, 0, -1, 1};  // in the order of DType
  static_assert(kNumbers.size() == kDTypes);
  return kNumbers.at(static_cast<std::size_t>(dtype));
}

int op_for_nccl(ReduceOp op) {
  constexpr std::array kNumbers{0, 4, 3, 2, 1};  // in the order of ReduceOp
  return kNumbers.at(static_cast<std::size_t>(op));
}

struct NcclCommunicator::State {
  explicit State(int device_of_rank) : device(device_of_rank) {}

  const int device;
  NcclHandle handle = nullptr;  // constant once it is made

  // Held for each call of NCCL, none of which takes long, except where NCCL hangs.
  std::timed_mutex calls;
  std::atomic<bool> aborted = false;  // before the abort takes `calls`: nobody uses the handle from there on

  // The last one that was split from this one: NCCL writes its handle, until this one's abort has ended.
  std::shared_ptr<State> child;

  Mutex mutex;
  CondVar changed;
  bool begun LOCKSTEP_GUARDED_BY(mutex) = false;  // the abort
  bool ended LOCKSTEP_GUARDED_BY(mutex) = false;
};

NcclCommunicator::NcclCommunicator(const NcclId& id, int rank, int size, int device, const std::function<void()>& check,
                                   Deadline deadline)
    : state_(std::make_shared<State>(device)) {
  const OnDevice here(device);
  NcclConfig config;
  const int result = nccl().ncclCommInitRankConfig(&state_->handle, size, id, rank, &config);
  try {
    finish(result, "ncclCommInitRankConfig", check, deadline);
  } catch (...) {
    abort();
    throw;
  }
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::split(int color, int key, const std::function<void()>& check,
                                                          Deadline deadline) {
  constexpr int kNoColor = -1;  // NCCL_SPLIT_NOCOLOR
  constexpr const char* kSplit = "ncclCommSplit";
  const OnDevice here(state_->device);
  state_->child = std::make_shared<State>(state_->device);
  const auto made = std::shared_ptr<NcclCommunicator>(new NcclCommunicator(state_->child));
  made->has_ended_ = true;  // one that is half made ends with this one
  NcclConfig config;
  int result = kSuccess;
  {
    const auto lock = lock_calls();
    result = nccl().ncclCommSplit(state_->handle, color < 0 ? kNoColor : color, key, &made->state_->handle, &config);
  }
  finish(result, kSplit, check, deadline);
  if (color < 0) return nullptr;
  made->has_ended_ = false;
  made->finish(kInProgress, kSplit, check, deadline);
  return made;
}

NcclCommunicator::~NcclCommunicator() {
  constexpr std::chrono::seconds kForAbort(1);
  if (has_ended_) return;
  abort();
  const auto until = Deadline::after(kForAbort);
  MutexLock lock(state_->mutex);
  while (!state_->ended) {
    if (state_->changed.wait_until(state_->mutex, until.time()) == std::cv_status::timeout) break;
  }
  if (!state_->ended) log_warning("NCCL's abort of a communicator hangs; its thread and its memory are left alone");
}

void NcclCommunicator::end(std::shared_ptr<NcclCommunicator> last) {
  std::thread([last = std::move(last)] { last->has_ended_ = last->end_with_others(); }).detach();
}

bool NcclCommunicator::end_with_others() {
  constexpr std::chrono::seconds kForOthers(5);
  try {
    const OnDevice here(state_->device);
    int result = kSuccess;
    {
      const auto lock = lock_calls();
      result = nccl().ncclCommFinalize(state_->handle);
    }
    finish(
        result, "ncclCommFinalize", [] {}, Deadline::after(kForOthers));
    const auto lock = lock_calls();
    require_nccl(nccl().ncclCommDestroy(state_->handle), "ncclCommDestroy");
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The abort may hang while it has the lock. The thread sanitizer knows waits by the system's clock alone.
std::unique_lock<std::timed_mutex> NcclCommunicator::lock_calls() const {
  constexpr std::chrono::milliseconds kBetweenLooks(10);
  std::unique_lock lock(state_->calls, std::defer_lock);
  while (!state_->aborted && !lock.try_lock_until(std::chrono::system_clock::now() + kBetweenLooks)) {
  }
  if (state_->aborted) throw Aborted("the group was aborted: NCCL's communicator has ended");
  return lock;
}

void NcclCommunicator::finish(int result, const char* function, const std::function<void()>& check, Deadline deadline) {
  constexpr std::chrono::milliseconds kBetweenChecks(5);
  auto checked = Deadline::Clock::now();
  const bool in_time = wait_until(
      [&] {
        if (result == kInProgress && state_->handle != nullptr) {
          const auto lock = lock_calls();
          int now = kSuccess;
          require_nccl(nccl().ncclCommGetAsyncError(state_->handle, &now), "ncclCommGetAsyncError", state_->handle);
          result = now;
        }
        if (result == kInProgress && Deadline::Clock::now() - checked > kBetweenChecks) {
          check();
          checked = Deadline::Clock::now();
        }
        return result != kInProgress;
      },
      deadline);
  if (!in_time) throw DeadlineExceeded(function, deadline.waited());
  const auto lock = lock_calls();
  require_nccl(result, function, state_->handle);
}

void NcclCommunicator::run(const std::function<void(NcclHandle)>& enqueue, const std::function<void()>& check,
                           Deadline deadline) {
  const OnDevice here(state_->device);
  int result = kSuccess;
  {
    const auto lock = lock_calls();
    require_nccl(nccl().ncclGroupStart(), "ncclGroupStart");
    try {
      enqueue(state_->handle);
    } catch (...) {
      nccl().ncclGroupEnd();
      throw;
    }
    result = nccl().ncclGroupEnd();
  }
  finish(result, "ncclGroupEnd", check, deadline);
}

std::string NcclCommunicator::error() {
  const std::unique_lock lock(state_->calls, std::try_to_lock);
  if (!lock.owns_lock() || state_->aborted) return "";  // the thread that makes a call sees an error by itself
  int result = kSuccess;
  const int asked = nccl().ncclCommGetAsyncError(state_->handle, &result);
  if (asked != kSuccess) result = asked;
  return result == kSuccess || result == kInProgress ? "" : words_for(result, state_->handle);
}

void NcclCommunicator::abort() {
  {
    MutexLock lock(state_->mutex);
    if (std::exchange(state_->begun, true)) return;
  }
  state_->aborted = true;
  std::thread([state = state_] {
    constexpr std::chrono::seconds kForCalls(1);
    std::unique_lock lock(state->calls, std::defer_lock);  // without the lock after a while: then a call of NCCL hangs
    (void)lock.try_lock_until(std::chrono::system_clock::now() + kForCalls);
    if (state->handle != nullptr) end_on(state->device, [&] { nccl().ncclCommAbort(state->handle); });
    MutexLock end(state->mutex);
    state->ended = true;
    state->changed.notify_all();
  }).detach();
}

}  // namespace lockstep::collective::gpus
