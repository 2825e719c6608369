// The session that init makes: this process's place among the ranks, their Group, and the thread that carries
// operations out in the order of their calls.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "front_ends/horovod/on_stream.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/collective/make_group.h"

namespace lockstep::horovod {

// A rank tells the others its announcement before an operation. Calls agree when their texts do.
struct Announcement {
  enum class Kind : std::uint8_t { joined, reduction, gradients, other };

  Kind kind = Kind::other;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  std::int64_t elements = 0;   // of a reduction
  std::int64_t optimizer = 0;  // of gradients: its number
  std::int64_t own = 0;        // not compared: what differs by rank, such as how much it sends
  bool on_gpu = false;         // not compared: whether this rank's tensors are on the Session's GPU
  std::uint64_t hash = 0;      // of the whole text
  std::array<char, 200> text{};

  // "allreduce of float [2, 3]".
  static Announcement of(const std::string& call);
};

// True where each rank's tensors are on its Session's GPU. A rank that has joined has none, and takes part there.
bool are_on_gpus(const std::vector<Announcement>& all);

class Session {
 public:
  struct Position {
    World world;
    int cross_rank = 0, cross_size = 1;  // among those with one local rank
    bool homogeneous = true;
  };

  Session(Position position, Communicator ranks);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // The process's session or, in a thread with a Use, that one. Throws Error where there is none.
  static std::shared_ptr<Session> current();
  static bool exists();
  static void set(std::shared_ptr<Session> session);

  // For ranks that are threads of one process: while it lives, this thread's session.
  class Use {
   public:
    explicit Use(std::shared_ptr<Session> session);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const std::shared_ptr<Session> before_;
  };

  const Position& position() const { return position_; }
  const World& world() const { return position_.world; }
  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }
  const Group& group() const { return ranks_.group(); }
  Deadline deadline() const { return ranks_.deadline(); }

  // `task` runs when all earlier tasks have ended: it negotiates with the others, then does what it announced. Any
  // thread.
  Work start(std::function<void()> task) { return start(std::nullopt, std::move(task)); }
  void run(const std::function<void()>& task) { start(task).wait(); }

  // Starts a task for tensors on a GPU, as add_on_stream does. `stream`: what stream_for returned.
  Work start(const std::optional<c10::Stream>& stream, std::function<void()> task, const std::vector<Tensor>& used = {},
             std::function<std::vector<Tensor>()> results = nullptr);

  // The stream of this session's operations on the GPU, if all tensors are there. The first such tensors decide which
  // GPU is the session's, since a Group has one a rank; what is on others goes through host memory. Any thread.
  std::optional<c10::Stream> stream_for(const std::vector<Tensor>& tensors);

  // Returns when all calls on a GPU are done that this rank has made by this session, its process sets and the
  // optimizers; throws where one has failed. Not in tasks.
  void synchronize();

  // In tasks: every rank's announcement, in their order. Throws InvalidArgument on all ranks where calls differ, and
  // where a rank has joined and cannot take part.
  std::vector<Announcement> negotiate(const Announcement& mine);

  // To be called in tasks, after negotiate: carries the announced call out. A call that was not announced would be
  // refused.
  void carry_out(Call call) const { carry_out(std::vector{std::move(call)}); }
  void carry_out(std::vector<Call> calls) const;

  // A Communicator of all ranks with a separate Group for `what`. Collective. Not in tasks.
  Communicator split(const std::string& what);

  // A session of some of the ranks, which are ascending; null on a rank that is not among them. Collective over all.
  // Not in tasks.
  std::shared_ptr<Session> among(const std::vector<int>& ranks, const std::string& what);

  // A Communicator of this rank alone, with the same timeout.
  Communicator alone() const { return ranks_.with_group(make_thread_groups(1)[0]); }

  // See horovod::join.
  int join();

  // Called on a rank that has joined when the others announce gradients of that optimizer; one backward may announce
  // those of several. Numbers count from 0, in the order of calls.
  // `ranks` are those of its gradients.
  using ShadowAllReduce = std::function<Work()>;
  std::int64_t add_optimizer(ShadowAllReduce all_reduce, const Communicator& ranks);
  void remove_optimizer(std::int64_t number);

 private:
  std::vector<Announcement> exchange(Announcement mine);
  void answer(const Announcement& theirs, bool on_gpu, std::vector<Work>& started);
  std::optional<c10::Stream> stream();

  const Position position_;
  const Communicator ranks_;
  int last_active_;  // the highest rank that had not joined at the last exchange; used by the thread alone

  struct OptimizerOfRanks {
    ShadowAllReduce all_reduce;
    Communicator ranks;
  };

  Mutex mutex_;
  std::optional<c10::Stream> stream_ LOCKSTEP_GUARDED_BY(mutex_);  // on this session's GPU
  std::vector<std::weak_ptr<Session>> sets_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<std::int64_t, OptimizerOfRanks> optimizers_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t next_optimizer_ LOCKSTEP_GUARDED_BY(mutex_) = 0;

  collective::ProgressThread thread_;  // ends before what it works on
};

}  // namespace lockstep::horovod
