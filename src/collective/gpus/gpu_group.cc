// Buffers on GPUs: a wrapper whose ranks meet in NCCL at their first call on a GPU, or bring the buffers to host
// memory.
#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "collective/calls.h"
#include "collective/gpus/nccl.h"
#include "collective/gpus/nccl_calls.h"
#include "collective/gpus/progress.h"
#include "collective/gpus/rank_of_gpu.h"
#include "collective/gpus/watch.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/collective/group_wrappers.h"

namespace lockstep {
namespace {

using namespace collective::gpus;

constexpr const char* kAuto = "auto";
constexpr const char* kNccl = "nccl";
constexpr const char* kHost = "host";
constexpr const char* kOperation = "a call on a GPU";  // of a rank that is lost meanwhile

class GpuGroup final : public collective::Wrapper {
 public:
  GpuGroup(std::shared_ptr<GroupBackend> host, std::string wanted)
      : collective::Wrapper(host),
        host_group_(std::move(host)),
        wanted_(std::move(wanted)),
        progress_(host_group_->numbers(), rank(), size()),
        watch_({.problem = [this](auto runs) { return has_problem(runs); },
                .on_idle = [this] { answer_others(); },
                .on_late = [this](const auto& call) { give_up(call); },
                .on_end = [this](const auto& call) { call.ended->tell(!has_failed()); },
                .on_error =
                    [this](const auto& why) { fail(Failure::aborted(rank(), text("rank ", rank(), ": ", why))); }}) {}

  // The last calls on the GPU end by their own deadlines, or at once where an exception has made the Group go.
  ~GpuGroup() override {
    if (std::uncaught_exceptions() > 0 && !watch_.is_idle()) {
      fail(Failure::aborted(rank(), text("rank ", rank(), " gave up what it had started")));
    }
    watch_.wait_for_all(Deadline::never());
    if (auto nccl_ranks = communicator()) NcclCommunicator::end(std::move(nccl_ranks));
  }

  const char* run(const Call& call, Deadline deadline) override {
    return in_host_memory([&] { return collective::Wrapper::run(call, deadline); });
  }

  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    return in_host_memory([&] { return collective::Wrapper::exchange(calls, deadline); });
  }

  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override {
    require_no_capture(calls);
    watch_.is_idle() ? look(kOperation, /*also_left=*/false) : raise_if_failed();
    begin(collective::device_of(calls[0]).index, deadline);
    const OnDevice here(stream_->device());
    const bool by_nccl = uses_nccl_ && std::all_of(calls.begin(), calls.end(), &nccl_knows);
    return by_nccl ? enqueue_in_nccl(calls, deadline) : run_in_host_memory(calls, deadline);
  }

  bool reaches(MemoryDevice device, Deadline deadline) override {
    if (device.type != MemoryDevice::Type::host) begin(device.index, deadline);
    return device.type == MemoryDevice::Type::host || uses_nccl_;
  }

  void look(const char* operation, bool also_left) override {
    raise_if_failed();
    in_host_memory([&] {
      collective::Wrapper::look(operation, also_left);
      return "";
    });
  }

  void synchronize(Deadline deadline) override {
    const bool in_time = watch_.wait_for_all(deadline);
    raise_if_failed();
    if (!in_time) throw DeadlineExceeded("synchronize", deadline.waited());
  }

  // A group whose GPUs are connected connects those of each group that is split from it. The GPUs of other groups are
  // connected at the first call.
  void begin_split(int color, int key, Deadline deadline) override {
    collective::Wrapper::begin_split(color, key, deadline);
    const auto nccl_ranks = communicator();
    if (!nccl_ranks) return;
    auto made = or_fail([&] {
      synchronize(deadline);  // NCCL splits a communicator that has nothing to do
      // A rank whose part is done may leave.
      return nccl_ranks->split(
          color, key, [this] { look(kOperation, /*also_left=*/false); }, deadline);
    });
    MutexLock lock(mutex_);
    split_ = std::move(made);
  }

  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    auto made = std::make_shared<GpuGroup>(collective::Wrapper::make(members, deadline), wanted_);
    MutexLock lock(mutex_);
    if (split_) made->begin_with(std::exchange(split_, nullptr), stream_->device());
    return made;
  }

  std::vector<Memory> allocate_shared(std::size_t bytes, Deadline deadline) override {
    std::vector<Memory> parts;
    in_host_memory([&] {
      parts = collective::Wrapper::allocate_shared(bytes, deadline);
      return "";
    });
    return parts;
  }

  void fail(const Failure& failure) override {
    collective::Wrapper::fail(failure);
    try {
      failure.raise(rank(), generation());
    } catch (const Error&) {
      keep(std::current_exception());
    }
    abort_nccl();
  }

 private:
  // While no call is on a GPU, nobody else uses the group in host memory.
  template <class Act>
  const char* in_host_memory(const Act& act) {
    if (!stream_) return act();
    const std::lock_guard lock(host_calls_);
    return act();
  }

  // Decides, with the others, how buffers on GPUs are moved.
  void begin(int device, Deadline deadline) {
    if (stream_ && stream_->device() != device) {
      throw InvalidArgument(text("the buffer is on cuda:", device, "; the earlier calls of this rank were on cuda:",
                                 stream_->device(), ", and a Group has one GPU a rank"));
    }
    if (stream_) return;
    std::vector<RankOfGpu> ranks;
    if (wanted_ != kHost && size() > 1) ranks = meet(this_rank(rank(), device), deadline);
    const auto problem = problem_of(ranks);
    if (!problem.empty() && wanted_ == kNccl) throw InvalidArgument(text("buffers on GPUs need NCCL: ", problem));
    auto stream = std::make_unique<Stream>(device);
    if (!problem.empty() && rank() == 0) log_warning(text("buffers on GPUs go through host memory: ", problem));
    if (!ranks.empty() && problem.empty()) connect(ranks[0].id, device, deadline);
    uses_nccl_ = wanted_ != kHost && problem.empty();
    if (uses_nccl_) watch_.begin();
    stream_ = std::move(stream);
  }

  void begin_with(std::shared_ptr<NcclCommunicator> nccl_ranks, int device) {
    stream_ = std::make_unique<Stream>(device);
    uses_nccl_ = true;
    MutexLock lock(mutex_);
    communicator_ = std::move(nccl_ranks);
    watch_.begin();
  }

  std::vector<RankOfGpu> meet(const RankOfGpu& mine, Deadline deadline) {
    static const Purpose kMeeting("agreeing how buffers on GPUs are moved");
    const auto left = std::chrono::duration<double>(deadline.time() - Deadline::Clock::now()).count();
    constexpr double kShortest = 1e-3;
    const Communicator communicator(Group(host_group_), std::max(left, kShortest), "rank");
    std::vector<RankOfGpu> ranks;
    for (const auto& words : communicator.with_purpose(kMeeting).all_gather(mine.words())) {
      ranks.push_back(RankOfGpu::of(words));
    }
    return ranks;
  }

  void connect(const std::string& bytes, int device, Deadline deadline) {
    NcclId id;
    if (bytes.size() != id.bytes.size()) throw Error(text("an id of NCCL has ", bytes.size(), " bytes"));
    std::copy(bytes.begin(), bytes.end(), id.bytes.begin());
    auto made = or_fail([&] {
      return std::make_shared<NcclCommunicator>(
          id, rank(), size(), device, [this] { look(kOperation, /*also_left=*/true); }, deadline);
    });
    MutexLock lock(mutex_);
    communicator_ = std::move(made);
  }

  // A rank that cannot make a communicator fails the group, so that the others do not wait for it.
  template <class Make>
  std::invoke_result_t<Make> or_fail(const Make& make_communicator) {
    try {
      return make_communicator();
    } catch (const DeadlineExceeded& error) {
      fail(Failure::deadline(rank(), {}, error.waited_for().count(), error.operation()));
      throw;
    } catch (const Error& error) {
      fail(Failure::aborted(rank(), text("rank ", rank(), ": ", error.what())));
      throw;
    }
  }

  // Calls go on side by side, except that one waits for those before it whose memory it uses.
  EnqueuedCalls enqueue_in_nccl(std::span<const Call> calls, Deadline deadline) {
    struct Enqueuing {
      explicit Enqueuing(std::atomic<bool>& flag) : enqueues(flag) { enqueues = true; }
      ~Enqueuing() { enqueues = false; }
      std::atomic<bool>& enqueues;
    } const enqueuing(enqueues_);
    for (const auto& call : calls) stream_->wait_for(stream_->now_in(call.stream));
    for (auto rest = calls; !rest.empty();) {
      const auto together = rest.first(number_apart(rest));
      enqueue_together(together, deadline);
      rest = rest.subspan(together.size());
    }
    const auto end = stream_->now();
    const auto together = watched(calls, end, deadline);
    watch_.add(together);
    fail_point("gpus.enqueued");
    std::set<CudaStream> streams;
    for (const auto& call : calls) streams.insert(call.stream);
    return {.join =
                [this, streams, end] {
                  for (const auto stream : streams) stream_->wait_in(stream, end);
                  raise_if_failed();
                },
            .done = [end] { return has_come(end); },
            .ended = together.ended,
            .algorithm = "NCCL"};
  }

  void enqueue_together(std::span<const Call> calls, Deadline deadline) {
    copy_own_parts(calls, rank(), size(), stream_->get());
    count(calls);
    if (const auto nccl_ranks = communicator()) {
      const auto enqueue_all = [&](NcclHandle handle) {
        for (const auto& call : calls) enqueue_call(call, rank(), size(), handle, stream_->get());
      };
      try {
        nccl_ranks->run(
            enqueue_all, [this] { look(kOperation, /*also_left=*/true); }, deadline);
      } catch (const DeadlineExceeded&) {
        give_up(watched(calls, {}, deadline));
        raise_if_failed();
      } catch (const Error& error) {
        fail(Failure::aborted(rank(), text("rank ", rank(), ": ", error.what())));
        throw;
      }
    }
  }

  // Messages are not counted: not all ranks make them.
  void count(std::span<const Call> calls) {
    for (const auto& call : calls) calls_ += collective::is_message(call) ? 0 : 1;
    show_progress();
  }

  WatchedCall watched(std::span<const Call> calls, const Moment& end, Deadline deadline) const {
    WatchedCall watched{.kind = calls[0].kind, .number = calls_, .end = end, .deadline = deadline};
    for (const auto& call : calls) {
      if (collective::is_message(call)) watched.peers.push_back(call.peer);
    }
    if (watched.peers.size() < calls.size()) watched.peers.clear();
    return watched;
  }

  EnqueuedCalls run_in_host_memory(std::span<const Call> calls, Deadline deadline) {
    std::deque<HostCopies> copies;
    std::vector<Call> messages;  // side by side, so that two ranks may each send first
    for (const auto& call : calls) {
      copies.emplace_back(call, *stream_, deadline);
      if (collective::is_message(call)) messages.push_back(copies.back().call());
    }
    in_host_memory([&] {
      if (!messages.empty()) inner().exchange(messages, deadline);
      for (const auto& copy : copies) {
        if (!collective::is_message(copy.call())) inner().run(copy.call(), deadline);
      }
      return "";
    });
    for (auto& copy : copies) copy.bring_back(rank(), deadline);
    auto ended = std::make_shared<EndOfCalls>();
    ended->tell(true);
    return {.join = [] {}, .done = [] { return true; }, .ended = std::move(ended), .algorithm = "through host memory"};
  }

  // Returns true where the calls that run can no longer end.
  bool has_problem(Deadline::Clock::duration runs) {
    constexpr std::chrono::seconds kForLast(2);  // what a rank that has left had still to send
    const auto nccl_ranks = communicator();
    const auto error = nccl_ranks ? nccl_ranks->error() : "";
    if (!error.empty()) fail(Failure::aborted(rank(), text("rank ", rank(), ": NCCL: ", error)));
    return !look_between_calls(/*also_left=*/runs > kForLast);
  }

  // Returns false where the group has failed, and keeps the error. A call in host memory sees by itself what is wrong.
  bool look_between_calls(bool also_left) {
    const std::unique_lock lock(host_calls_, std::try_to_lock);
    if (!lock.owns_lock()) return true;
    try {
      collective::Wrapper::look(kOperation, also_left);
      return true;
    } catch (const Error&) {
      keep(std::current_exception());
      abort_nccl();
      return false;
    }
  }

  // The first error is kept.
  void keep(const std::exception_ptr& error) {
    MutexLock lock(mutex_);
    if (!error_) error_ = error;
  }

  void raise_if_failed() {
    MutexLock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

  bool has_failed() {
    MutexLock lock(mutex_);
    return error_ != nullptr;
  }

  std::shared_ptr<NcclCommunicator> communicator() {
    MutexLock lock(mutex_);
    return communicator_;
  }

  void abort_nccl() {
    if (const auto nccl_ranks = communicator()) nccl_ranks->abort();
  }

  // The deadline of `late` has passed: names the ranks that did not make the call, and fails the group.
  void give_up(const WatchedCall& late) {
    const auto ranks = progress_.ranks_without(late, [this] { return look_between_calls(/*also_left=*/false); });
    if (!ranks) return abort_nccl();
    const auto waited = late.deadline.waited();
    keep(std::make_exception_ptr(DeadlineExceeded(name_of(late.kind), waited, *ranks)));
    fail(Failure::deadline(rank(), *ranks, waited.count(), name_of(late.kind)));
  }

  void show_progress() {
    progress_.show([this] { return calls_.load(); }, [this] { return enqueues_ || !watch_.is_idle(); });
  }

  // While this rank makes no calls, others may ask how many it has made.
  void answer_others() {
    show_progress();
    const std::unique_lock lock(host_calls_, std::try_to_lock);
    if (lock.owns_lock()) progress_.answer();
  }

  const std::shared_ptr<GroupBackend> host_group_;
  const std::string wanted_;
  Progress progress_;
  std::timed_mutex host_calls_;  // held while this rank is in a call of the group in host memory

  // Made by the first call on a GPU.
  std::unique_ptr<Stream> stream_;
  bool uses_nccl_ = false;
  std::atomic<std::int64_t> calls_ = 0;  // on the GPU, but for messages
  std::atomic<bool> enqueues_ = false;   // calls that the watch does not have yet

  mutable Mutex mutex_;
  mutable std::shared_ptr<NcclCommunicator> split_ LOCKSTEP_GUARDED_BY(mutex_);  // from begin_split to make
  std::shared_ptr<NcclCommunicator> communicator_ LOCKSTEP_GUARDED_BY(mutex_);   // null where NCCL is not used
  std::exception_ptr error_ LOCKSTEP_GUARDED_BY(mutex_);                         // of a call on the GPU

  Watch watch_;  // ends first
};

}  // namespace

Group with_gpus(const Group& group, const std::string& gpu_backend) {
  for (const auto* const known : {kAuto, kNccl, kHost}) {
    if (gpu_backend == known)
      return group.with_backend(std::make_shared<GpuGroup>(group.shared_backend(), gpu_backend));
  }
  throw InvalidArgument(text("there is no gpu_backend \"", gpu_backend, "\"; there are auto, nccl and host"));
}

}  // namespace lockstep
