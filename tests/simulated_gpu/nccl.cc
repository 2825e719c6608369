#include "nccl.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "nccl_communicator.h"
#include "nccl_faults.h"
#include "nccl_operations.h"
#include "nccl_rendezvous.h"

namespace simulated_nccl {
namespace {

using Kind = Operation::Kind;
using Shared = std::shared_ptr<Communicator>;
using lockstep::text;
using std::size_t;

// The communicators, by their handles. Threads of communicators may outlive all else.
class Registry {
 public:
  static Registry& get() {
    static auto* const registry = new Registry;
    return *registry;
  }

  ncclComm_t add(const Shared& communicator) {
    const std::lock_guard lock(mutex_);
    auto* const handle = reinterpret_cast<ncclComm_t>(++last_);
    communicators_[handle] = communicator;
    return handle;
  }

  Shared find(ncclComm_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(handle);
    if (found == communicators_.end()) throw Failed(kInvalidArgument, "there is no such communicator");
    return found->second;
  }

  void remove(ncclComm_t handle) {
    const std::lock_guard lock(mutex_);
    communicators_.erase(handle);
  }

  std::atomic<std::int64_t> calls = 0;

 private:
  std::mutex mutex_;  // protects the following
  std::uintptr_t last_ = 0;
  std::map<ncclComm_t, Shared> communicators_;
};

// The calling thread's calls since ncclGroupStart.
struct CallGroup {
  int depth = 0;
  int result = kSuccess;
  std::vector<std::pair<Shared, Queued>> calls;
};

thread_local std::string last_error;
thread_local CallGroup call_group;

// Calls act(), and returns its result or that of what it throws.
template <class Act>
int result_of(const Act& act) {
  try {
    return act();
  } catch (const Failed& failed) {
    last_error = failed.what();
    return failed.result();
  } catch (const std::exception& error) {
    last_error = error.what();
    return kSystemError;
  }
}

void require(bool holds, const char* words) {
  if (!holds) throw Failed(kInvalidArgument, words);
}

// Returns whether a communicator blocks. Without a config it does as its parent.
bool blocks(const ncclConfig_t* config, bool by_default) {
  if (config == nullptr) return by_default;
  constexpr unsigned kMagic = 0xcafebeef, kOldest = 21400;
  require(config->magic == kMagic && config->size >= sizeof(ncclConfig_t) && config->version >= kOldest,
          "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  constexpr int kUndefined = INT32_MIN;
  if (config->blocking == kUndefined) return by_default;
  require(config->blocking == 0 || config->blocking == 1, "the config's blocking must be 0 or 1");
  return config->blocking == 1;
}

// Calls connect(communicator) for a new one, whose handle is in *made meanwhile. Leaves null there where that throws.
template <class Connect>
int make(ncclComm_t* made, int device, bool blocking, const Connect& connect) {
  const auto communicator = std::make_shared<Communicator>(device, blocking);
  *made = Registry::get().add(communicator);
  try {
    return connect(communicator);
  } catch (...) {
    Registry::get().remove(std::exchange(*made, nullptr));
    throw;
  }
}

int device_of_thread() {
  int device = 0;
  if (cudaGetDevice(&device) != 0) throw Failed(kUnhandledCudaError, "there is no GPU");
  return device;
}

// Launches the calls of each communicator together.
int launch(const std::vector<std::pair<Shared, Queued>>& calls) {
  std::vector<Shared> order;
  std::map<Shared, std::vector<Queued>> queued;
  for (const auto& [communicator, call] : calls) {
    if (!queued.contains(communicator)) order.push_back(communicator);
    queued[communicator].push_back(call);
  }
  int result = kSuccess;
  for (const auto& communicator : order) {
    if (communicator->launch(queued[communicator]) == kInProgress) result = kInProgress;
  }
  return result;
}

int call(ncclComm_t handle, const Operation& operation, cudaStream_t stream) {
  const int result = result_of([&] {
    ++Registry::get().calls;
    const auto communicator = Registry::get().find(handle);
    communicator->require_ready();
    const auto member = communicator->member();
    if (const auto problem = problem_with(operation, member); !problem.empty()) {
      throw Failed(kInvalidArgument, problem);
    }
    if (Faults::get().strikes("call-error", member.rank)) {
      throw Failed(kInternalError, "the test's fault call-error");
    }
    if (operation.count == 0) return kSuccess;
    call_group.calls.emplace_back(communicator, Queued{operation, stream});
    return call_group.depth > 0 ? kSuccess : launch(std::exchange(call_group.calls, {}));
  });
  if (call_group.depth > 0 && result != kSuccess) call_group.result = result;
  return result;
}

}  // namespace
}  // namespace simulated_nccl

using namespace simulated_nccl;

namespace {

// An id of NCCL's has bytes of every kind.
constexpr std::array<char, 4> kBeforeLocation{'\n', '\0', '\x7f', '\xff'};

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  return result_of([&] {
    require(version != nullptr, "version is null");
    const char* const given = std::getenv("LOCKSTEP_SIMULATED_NCCL_VERSION");
    *version = given == nullptr ? ncclConfig_t{}.version : std::atoi(given);
    return kSuccess;
  });
}

int ncclGetUniqueId(ncclUniqueId* id) {
  return result_of([&] {
    require(id != nullptr, "id is null");
    if (Faults::get().holds("no-id", -1)) throw Failed(kSystemError, "the test's fault no-id");
    *id = {};
    const auto location = hold_store_of_id();
    std::memcpy(id->internal + kBeforeLocation.size(), location.data(), location.size());
    std::copy(kBeforeLocation.begin(), kBeforeLocation.end(), id->internal);
    return kSuccess;
  });
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess: return "no error";
    case kUnhandledCudaError: return "unhandled cuda error";
    case kSystemError: return "unhandled system error";
    case kInternalError: return "internal error";
    case kInvalidArgument: return "invalid argument";
    case kInvalidUsage: return "invalid usage";
    case kRemoteError: return "remote process exited or there was a network error";
    case kInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

// The text is valid until the thread's next call.
const char* ncclGetLastError(ncclComm_t handle) {
  if (handle != nullptr) {
    result_of([&] {
      if (auto error = Registry::get().find(handle)->error(); !error.empty()) last_error = std::move(error);
      return kSuccess;
    });
  }
  return last_error.c_str();
}

int ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

int ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return result_of([&] {
    require(made != nullptr, "newcomm is null");
    require(rank >= 0 && rank < size, "the rank must be from 0 to nranks - 1");
    if (call_group.depth > 0) throw Failed(kInvalidUsage, "communicators are not made in a group of calls here");
    require(std::equal(kBeforeLocation.begin(), kBeforeLocation.end(), id.internal), "the id is none of NCCL's");
    const char* const begin = id.internal + kBeforeLocation.size();
    const std::string location(begin, strnlen(begin, sizeof id.internal - kBeforeLocation.size()));
    return make(made, device_of_thread(), blocks(config, true),
                [&](const Shared& communicator) { return communicator->init(location, rank, size); });
  });
}

int ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  return result_of([&] {
    require(made != nullptr, "newcomm is null");
    require(color >= kNoColor, "the color must be 0 or more, or NCCL_SPLIT_NOCOLOR");
    const auto parent = Registry::get().find(handle);
    parent->require_settled();
    parent->require_idle();
    *made = nullptr;
    const auto child = std::make_shared<Communicator>(parent->device(), blocks(config, parent->blocking()));
    return parent->split(color, key, child, [=] {
      if (color != kNoColor) std::atomic_ref(*made).store(Registry::get().add(child), std::memory_order_release);
    });
  });
}

int ncclCommFinalize(ncclComm_t handle) {
  return result_of([&] {
    const auto communicator = Registry::get().find(handle);
    communicator->require_settled();
    return communicator->finalize();
  });
}

int ncclCommDestroy(ncclComm_t handle) {
  if (handle == nullptr) return kSuccess;
  return result_of([&] {
    Registry::get().find(handle)->destroy();
    Registry::get().remove(handle);
    return kSuccess;
  });
}

int ncclCommAbort(ncclComm_t handle) {
  if (handle == nullptr) return kSuccess;
  return result_of([&] {
    const auto communicator = Registry::get().find(handle);
    while (Faults::get().holds("abort-hangs", communicator->member().rank)) {
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
    communicator->end("the communicator was aborted");
    Registry::get().remove(handle);
    return kSuccess;
  });
}

int ncclCommGetAsyncError(ncclComm_t handle, int* result) {
  return result_of([&] {
    require(result != nullptr, "asyncError is null");
    *result = Registry::get().find(handle)->result();
    return kSuccess;
  });
}

int ncclCommCount(ncclComm_t handle, int* count) {
  return result_of([&] {
    const auto communicator = Registry::get().find(handle);
    communicator->require_settled();
    *count = communicator->member().size;
    return kSuccess;
  });
}

int ncclCommUserRank(ncclComm_t handle, int* rank) {
  return result_of([&] {
    const auto communicator = Registry::get().find(handle);
    communicator->require_settled();
    *rank = communicator->member().rank;
    return kSuccess;
  });
}

int ncclCommCuDevice(ncclComm_t handle, int* device) {
  return result_of([&] {
    const auto communicator = Registry::get().find(handle);
    communicator->require_settled();
    *device = communicator->device();
    return kSuccess;
  });
}

int ncclGroupStart() {
  ++call_group.depth;
  return kSuccess;
}

int ncclGroupEnd() {
  return result_of([] {
    if (call_group.depth == 0) throw Failed(kInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--call_group.depth > 0) return kSuccess;
    const auto calls = std::exchange(call_group.calls, {});
    const int result = std::exchange(call_group.result, kSuccess);
    return result == kSuccess ? launch(calls) : result;
  });
}

int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op, ncclComm_t communicator,
                  cudaStream_t stream) {
  return call(communicator, {Kind::all_reduce, from, to, count, dtype, op}, stream);
}

int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root, ncclComm_t communicator,
                  cudaStream_t stream) {
  return call(communicator, {Kind::broadcast, from, to, count, dtype, kSum, root}, stream);
}

int ncclReduce(const void* from, void* to, size_t count, int dtype, int op, int root, ncclComm_t communicator,
               cudaStream_t stream) {
  return call(communicator, {Kind::reduce, from, to, count, dtype, op, root}, stream);
}

int ncclAllGather(const void* from, void* to, size_t count, int dtype, ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, {Kind::all_gather, from, to, count, dtype}, stream);
}

int ncclReduceScatter(const void* from, void* to, size_t count, int dtype, int op, ncclComm_t communicator,
                      cudaStream_t stream) {
  return call(communicator, {Kind::reduce_scatter, from, to, count, dtype, op}, stream);
}

int ncclSend(const void* from, size_t count, int dtype, int peer, ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, {Kind::send, from, nullptr, count, dtype, kSum, peer}, stream);
}

int ncclRecv(void* to, size_t count, int dtype, int peer, ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, {Kind::recv, nullptr, to, count, dtype, kSum, peer}, stream);
}

void simulated_nccl_fault(const char* what, int rank) {
  if (what == nullptr) {
    Faults::get().clear();
  } else {
    Faults::get().add(what, rank);
  }
}

std::int64_t simulated_nccl_calls() { return Registry::get().calls; }
}
