#include "nccl_communicator.h"

#include <algorithm>
#include <cstdio>
#include <span>
#include <sstream>
#include <thread>
#include <utility>

#include "base/text.h"
#include "collective/make.h"
#include "cuda_driver.h"
#include "lockstep/base/error.h"
#include "nccl.h"
#include "nccl_faults.h"

namespace simulated_nccl {
namespace {

using lockstep::Deadline;
using lockstep::MutexLock;
using lockstep::text;

// The calling thread's device, while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cuDevicePrimaryCtxRetain(&context_, device);
    cuCtxPushCurrent_v2(context_);
  }
  ~OnDevice() { cuCtxPopCurrent_v2(&context_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  CUcontext context_ = nullptr;
};

void require_cuda(int error) {
  if (error != 0) throw Failed(kUnhandledCudaError, text("Cuda failure ", error, " '", cudaGetErrorString(error), "'"));
}

// Later work of `after` waits for all work that `before` has by now.
void order(cudaStream_t before, cudaStream_t after) {
  cudaEvent_t event = nullptr;
  require_cuda(cudaEventCreateWithFlags(&event, 0));
  require_cuda(cudaEventRecord(event, before));
  require_cuda(cudaStreamWaitEvent(after, event, 0));
  require_cuda(cudaEventDestroy(event));
}

// The streams, each once. Throws for one that is not of the device.
std::vector<cudaStream_t> streams_of(const std::vector<Queued>& queued, int device) {
  std::vector<cudaStream_t> streams;
  for (const auto& [operation, stream] : queued) {
    int theirs = 0;
    require_cuda(cudaStreamGetDevice(stream, &theirs));
    if (theirs != device) {
      throw Failed(kUnhandledCudaError, text("the stream is of device ", theirs, ", the communicator of ", device));
    }
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }
  return streams;
}

}  // namespace

struct Communicator::Launched {
  std::shared_ptr<Communicator> communicator;
  std::vector<Operation> operations;
  std::uint64_t number = 0;
  bool is_stuck = false;   // a fault
  bool has_error = false;  // a fault
};

// The right to run what has this number. The constructor waits until what came before has ended. The communicator's end
// waits for that of a Turn that was had.
class Communicator::Turn {
 public:
  Turn(Communicator& communicator, std::uint64_t number) : communicator_(communicator) {
    MutexLock lock(communicator_.mutex_);
    while (communicator_.turn_ != number && !communicator_.ended_) communicator_.changed_.wait(communicator_.mutex_);
    if (communicator_.ended_) return;
    was_had_ = communicator_.running_ = true;
  }
  ~Turn() {
    if (!was_had_) return;
    MutexLock lock(communicator_.mutex_);
    communicator_.running_ = false;
    ++communicator_.turn_;
    communicator_.changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool was_had() const { return was_had_; }

 private:
  Communicator& communicator_;
  bool was_had_ = false;
};

int Communicator::init(const std::string& location, int rank, int size) {
  return start([=, this] {
    connect(connect_to(location, [this] { return ended(); }), rank, size);
    release_store_of_id(location);
  });
}

int Communicator::split(int color, int key, const std::shared_ptr<Communicator>& made,
                        const std::function<void()>& publish) {
  made->begin();
  int number = 0;
  {
    MutexLock lock(mutex_);
    child_ = made;
    number = children_++;
  }
  return start([=, this] {
    made->carry_out([=, this] {
      const auto store = connect_to(store_of(0), [&] { return made->ended(); });
      made->connect_by_color(store.prefixed(text("split ", number, "/")), member(), color, key);
    });
    {
      MutexLock lock(mutex_);
      child_.reset();
    }
    if (made->result() != kSuccess) throw Failed(made->result(), made->error());
    publish();
  });
}

void Communicator::connect_by_color(const lockstep::Store& store, const Member& parent, int color, int key) {
  const auto stop = [this] { return ended(); };
  set(store, text("rank ", parent.rank), text(color, " ", key), stop);
  std::vector<std::pair<int, int>> members;  // keys and ranks
  for (int rank = 0; rank < parent.size; ++rank) {
    int their_color = 0, their_key = 0;
    std::istringstream(wait_for(store, text("rank ", rank), stop)) >> their_color >> their_key;
    if (their_color == color) members.emplace_back(their_key, rank);
  }
  if (color < 0) return;
  std::sort(members.begin(), members.end());
  const auto mine = std::find(members.begin(), members.end(), std::pair(key, parent.rank));
  connect(store.prefixed(text("color ", color, "/")), static_cast<int>(mine - members.begin()),
          static_cast<int>(members.size()));
}

void Communicator::connect(const lockstep::Store& store, int rank, int size) {
  {
    MutexLock lock(mutex_);
    member_ = {rank, size, device_};
  }
  if (Faults::get().holds("init-error", rank)) throw Failed(kSystemError, "the test's fault init-error");
  if (Faults::get().holds("init-never-ends", rank)) wait_until_ended();
  Rendezvous members(store, rank, size, [this] { return ended(); });
  const auto own = hold_store();
  const auto mine = place_on(device_, own);
  const auto places = gather_places(mine, members);
  const lockstep::Group group(lockstep::collective::make_network_backend(
      "tcp", members, {mine.host, "127.0.0.1", store.access()}, {}, {}, Deadline::never()));
  std::uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    group_ = group;
    store_ = own;
    for (const auto& place : places) stores_.push_back(place.store);
    number = next_++;
  }
  const Turn turn(*this, number);
  if (!turn.was_had()) throw Failed(kInternalError, "the communicator was aborted");
  group.barrier(Deadline::never());  // the ranks have no more need of `store`
}

int Communicator::finalize() {
  std::uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    if (ended_ || std::exchange(finalized_, true)) throw Failed(kInvalidArgument, "the communicator was finalized");
    number = next_++;
  }
  return start([=, this] {
    const Turn turn(*this, number);
    if (!turn.was_had()) return;
    try {
      group().barrier(Deadline::never());
    } catch (const lockstep::Error&) {  // another rank has left: it waits for nothing
    }
  });
}

void Communicator::destroy() {
  bool is_finalized = false;
  {
    MutexLock lock(mutex_);
    if (result_ != kSuccess) throw Failed(result_ == kInProgress ? kInvalidArgument : result_, error_);
    is_finalized = ended_ || finalized_;
  }
  if (!is_finalized) finalize();
  std::optional<lockstep::Group> left;  // ends without the lock
  MutexLock lock(mutex_);
  while (result_ == kInProgress) changed_.wait(mutex_);
  ended_ = true;
  left.swap(group_);
}

void Communicator::end(const std::string& reason) {
  std::optional<lockstep::Group> group;  // ends without the lock
  std::shared_ptr<Communicator> child;
  {
    MutexLock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
    if (running_) group = group_;
    child = child_.lock();
  }
  if (child) child->end(reason);
  if (group) group->abort(reason);  // the other ranks' operations go on in their `run`
  MutexLock lock(mutex_);
  while (running_) changed_.wait(mutex_);
  if (!group) group.swap(group_);
  group_.reset();
}

int Communicator::launch(const std::vector<Queued>& queued) {
  auto launched = std::make_unique<Launched>();
  launched->communicator = shared_from_this();
  for (const auto& one : queued) launched->operations.push_back(one.operation);
  const auto me = member();
  if (const auto problem = problem_with_own_messages(launched->operations, me); !problem.empty()) {
    throw Failed(kInvalidUsage, problem);
  }
  launched->has_error = Faults::get().strikes("async-error", me.rank);
  launched->is_stuck = launched->has_error || Faults::get().strikes("stuck", me.rank);
  if (blocking_) {
    enqueue(queued, std::move(launched));
    return kSuccess;
  }
  return start([=, this, given = launched.release()] { enqueue(queued, std::unique_ptr<Launched>(given)); });
}

void Communicator::enqueue(const std::vector<Queued>& queued, std::unique_ptr<Launched> launched) {
  const OnDevice here(device_);
  const auto streams = streams_of(queued, device_);
  for (const auto stream : std::span(streams).subspan(1)) order(stream, streams[0]);
  {
    MutexLock lock(mutex_);
    launched->number = next_++;
  }
  const auto run_launched = [](void* data) {
    const std::unique_ptr<Launched> given(static_cast<Launched*>(data));
    given->communicator->run(*given);
  };
  require_cuda(cudaLaunchHostFunc(streams[0], run_launched, launched.release()));
  for (const auto stream : std::span(streams).subspan(1)) order(streams[0], stream);
}

// An operation that fails goes on until the communicator ends, as a kernel of NCCL does whose peer is lost.
void Communicator::run(const Launched& launched) {
  const Turn turn(*this, launched.number);
  if (!turn.was_had()) return;
  bool is_done = false;
  if (launched.has_error) {
    MutexLock lock(mutex_);
    result_ = kRemoteError;
    error_ = "the test's fault async-error";
  }
  if (!launched.is_stuck) {
    try {
      simulated_nccl::carry_out(launched.operations, group());
      is_done = true;
    } catch (const lockstep::InvalidArgument& error) {
      std::fprintf(stderr, "simulated NCCL: rank %d waits for ever: %s\n", member().rank, error.what());
    } catch (const std::exception&) {  // another rank was lost or aborted, or this one ended
    }
  }
  if (!is_done) wait_until_ended();
}

void Communicator::wait_until_ended() const {
  MutexLock lock(mutex_);
  while (!ended_) changed_.wait(mutex_);
}

int Communicator::start(const std::function<void()>& work) {
  begin();
  std::thread([self = shared_from_this(), work] { self->carry_out(work); }).detach();
  if (!blocking_) return kInProgress;
  MutexLock lock(mutex_);
  while (result_ == kInProgress) changed_.wait(mutex_);
  if (result_ != kSuccess) throw Failed(result_, error_);
  return kSuccess;
}

void Communicator::carry_out(const std::function<void()>& work) {
  try {
    work();
    settle(kSuccess, "");
  } catch (const Failed& failed) {
    settle(failed.result(), failed.what());
  } catch (const std::exception& error) {
    settle(kSystemError, error.what());
  }
}

void Communicator::begin() {
  MutexLock lock(mutex_);
  result_ = kInProgress;
}

// An error that came meanwhile stays.
void Communicator::settle(int result, const std::string& error) {
  MutexLock lock(mutex_);
  if (result_ == kInProgress) {
    result_ = result;
    error_ = error;
  }
  changed_.notify_all();
}

void Communicator::require_settled() const {
  MutexLock lock(mutex_);
  if (result_ == kInProgress) {
    throw Failed(kInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  if (result_ != kSuccess) throw Failed(result_, error_);
}

void Communicator::require_idle() const {
  MutexLock lock(mutex_);
  if (turn_ != next_) throw Failed(kInvalidUsage, "operations of the communicator are still running");
}

void Communicator::require_ready() const {
  require_settled();
  MutexLock lock(mutex_);
  if (ended_ || finalized_) throw Failed(kInvalidUsage, "the communicator was finalized or revoked");
}

int Communicator::result() const {
  MutexLock lock(mutex_);
  return result_;
}

std::string Communicator::error() const {
  MutexLock lock(mutex_);
  return error_;
}

bool Communicator::ended() const {
  MutexLock lock(mutex_);
  return ended_;
}

Member Communicator::member() const {
  MutexLock lock(mutex_);
  return member_;
}

lockstep::Group Communicator::group() const {
  MutexLock lock(mutex_);
  return *group_;
}

std::string Communicator::store_of(int rank) const {
  MutexLock lock(mutex_);
  return stores_.at(static_cast<std::size_t>(rank));
}

}  // namespace simulated_nccl
