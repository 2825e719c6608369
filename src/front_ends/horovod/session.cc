#include "front_ends/horovod/session.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep::horovod {
namespace {

const Purpose kAnnouncing("telling the others the next call of Horovod"), kOperation("the announced call of Horovod");

thread_local std::shared_ptr<Session> of_thread;

struct OfProcess {
  Mutex mutex;
  std::shared_ptr<Session> session LOCKSTEP_GUARDED_BY(mutex);
};
OfProcess& of_process() {
  static OfProcess holder;
  return holder;
}

std::shared_ptr<Session> found() {
  if (of_thread) return of_thread;
  MutexLock lock(of_process().mutex);
  return of_process().session;
}

bool is_joined(const Announcement& announcement) { return announcement.kind == Announcement::Kind::joined; }

// True where a rank that has joined can take part, with zeros.
bool has_zeros(const Announcement& announcement) {
  return announcement.kind == Announcement::Kind::gradients ||
         (announcement.kind == Announcement::Kind::reduction &&
          (announcement.op == ReduceOp::sum || announcement.op == ReduceOp::mean));
}

// Why the ranks' calls do not match; empty where they do.
std::string problem_of(const std::vector<Announcement>& all) {
  const auto first = std::find_if_not(all.begin(), all.end(), is_joined);
  if (first == all.end()) return "";
  const auto rank_of = [&](auto at) { return at - all.begin(); };
  const auto other = std::find_if(first, all.end(), [&](const Announcement& announcement) {
    return !is_joined(announcement) && announcement.hash != first->hash;
  });
  if (other != all.end()) {
    return text("the ranks' calls differ: rank ", rank_of(first), " calls ", first->text.data(), ", rank ",
                rank_of(other), " ", other->text.data());
  }
  const auto joined = std::find_if(all.begin(), all.end(), is_joined);
  if (joined == all.end() || has_zeros(*first)) return "";
  return text("rank ", rank_of(joined), " has joined: until all have, ranks call only allreduce with Sum or Average, ",
              "and steps of a DistributedOptimizer; rank ", rank_of(first), " calls ", first->text.data());
}

}  // namespace

Announcement Announcement::of(const std::string& call) {
  Announcement announcement;
  announcement.hash = hash_of(call);
  const auto shown = call.substr(0, announcement.text.size() - 1);
  std::copy(shown.begin(), shown.end(), announcement.text.begin());
  return announcement;
}

bool are_on_gpus(const std::vector<Announcement>& all) {
  return std::ranges::all_of(all, [](const Announcement& announcement) { return announcement.on_gpu; });
}

Session::Session(Position position, Communicator ranks)
    : position_(std::move(position)), ranks_(std::move(ranks)), last_active_(size() - 1) {}

Session::~Session() {
  if (thread_.busy()) group().abort(text("rank ", rank(), " shut down"));
}

std::shared_ptr<Session> Session::current() {
  auto session = found();
  if (!session) throw Error("horovod::init() was not called, or shutdown() was");
  return session;
}

bool Session::exists() { return found() != nullptr; }

void Session::set(std::shared_ptr<Session> session) {
  {
    MutexLock lock(of_process().mutex);
    of_process().session.swap(session);
  }
  // The previous session is destroyed here, without the lock.
}

Session::Use::Use(std::shared_ptr<Session> session) : before_(std::exchange(of_thread, std::move(session))) {}
Session::Use::~Use() { of_thread = before_; }

Work Session::start(const std::optional<c10::Stream>& stream, std::function<void()> task,
                    const std::vector<Tensor>& used, std::function<std::vector<Tensor>()> results) {
  const auto run = [this, task = std::move(task)] {
    try {
      task();
    } catch (const InvalidArgument&) {
      throw;  // thrown on all ranks, so nobody waits
    } catch (const std::exception& error) {
      group().abort(text("rank ", rank(), ": ", error.what()));
      throw;
    }
  };
  return add_on_stream(thread_, stream, run, used, std::move(results));
}

std::optional<c10::Stream> Session::stream_for(const std::vector<Tensor>& tensors) {
  if (tensors.empty() || !tensors[0].is_cuda()) return std::nullopt;
  const auto device = tensors[0].device();
  if (!std::ranges::all_of(tensors, [&](const Tensor& tensor) { return tensor.device() == device; })) {
    return std::nullopt;
  }
  MutexLock lock(mutex_);
  if (!stream_) stream_ = stream_of_pool(device);
  return stream_->device() == device ? stream_ : std::nullopt;
}

std::optional<c10::Stream> Session::stream() {
  MutexLock lock(mutex_);
  return stream_;
}

void Session::synchronize() {
  std::vector<Communicator> all{ranks_};
  std::vector<std::shared_ptr<Session>> sets;
  {
    MutexLock lock(mutex_);
    for (const auto& [number, optimizer] : optimizers_) all.push_back(optimizer.ranks);
    for (const auto& set : sets_) sets.push_back(set.lock());
  }
  for (const auto& ranks : all) ranks.group().synchronize(ranks.deadline());
  for (const auto& set : sets) {
    if (set) set->synchronize();
  }
}

std::vector<Announcement> Session::negotiate(const Announcement& mine) {
  auto all = exchange(mine);
  const auto problem = problem_of(all);
  if (!problem.empty()) throw InvalidArgument(problem);
  return all;
}

std::vector<Announcement> Session::exchange(Announcement mine) {
  std::vector<Announcement> all(static_cast<std::size_t>(size()));
  auto call =
      Call::all_gather({&mine, sizeof mine, DType::uint8}, {all.data(), all.size() * sizeof mine, DType::uint8});
  call.purpose = kAnnouncing;
  group().run(call, deadline());
  const auto active = std::find_if_not(all.rbegin(), all.rend(), is_joined);
  if (active != all.rend()) last_active_ = static_cast<int>(all.rend() - active) - 1;
  return all;
}

void Session::carry_out(std::vector<Call> calls) const {
  for (auto& call : calls) call.purpose = kOperation;
  group().run(calls, deadline());
}

Communicator Session::split(const std::string& what) {
  std::unique_ptr<Group> made;
  run([&] {
    negotiate(Announcement::of(what));
    made = group().split(0, rank(), deadline());
  });
  return ranks_.with_group(*made);
}

std::shared_ptr<Session> Session::among(const std::vector<int>& ranks, const std::string& what) {
  std::unique_ptr<Group> made;
  run([&] {
    negotiate(Announcement::of(what));
    made = group().split(std::ranges::binary_search(ranks, rank()) ? 0 : -1, rank(), deadline());
  });
  if (!made) return nullptr;
  auto set = std::make_shared<Session>(position_, ranks_.with_group(*made));
  MutexLock lock(mutex_);
  std::erase_if(sets_, [](const auto& other) { return other.expired(); });
  sets_.push_back(set);
  return set;
}

int Session::join() {
  int last = 0;
  const auto on_gpu = stream();
  const auto take_part = [&] {
    auto mine = Announcement::of("join");
    mine.kind = Announcement::Kind::joined;
    mine.on_gpu = on_gpu.has_value();
    std::vector<Work> started;
    while (true) {
      const auto all = exchange(mine);
      const auto active = std::find_if_not(all.begin(), all.end(), is_joined);
      if (active == all.end()) break;
      if (problem_of(all).empty()) answer(*active, are_on_gpus(all), started);
    }
    for (const auto& work : started) work.wait();
    last = std::exchange(last_active_, size() - 1);
  };
  start(on_gpu, take_part).wait();
  return last;
}

void Session::answer(const Announcement& theirs, bool on_gpu, std::vector<Work>& started) {
  if (theirs.kind == Announcement::Kind::reduction) {
    const auto device = on_gpu ? stream()->device() : at::Device(at::kCPU);
    const auto zeros =
        at::zeros({theirs.elements}, at::TensorOptions(ops::scalar_type_of(theirs.dtype)).device(device));
    carry_out(on_stream_of(zeros, Call::all_reduce(buffer_of(zeros), theirs.op)));
    return;
  }
  ShadowAllReduce all_reduce;
  {
    MutexLock lock(mutex_);
    const auto found = optimizers_.find(theirs.optimizer);
    if (found != optimizers_.end()) all_reduce = found->second.all_reduce;
  }
  if (!all_reduce)
    throw Error(text("rank ", rank(), " has joined and has no more the optimizer of ", theirs.text.data()));
  started.push_back(all_reduce());
}

std::int64_t Session::add_optimizer(ShadowAllReduce all_reduce, const Communicator& ranks) {
  MutexLock lock(mutex_);
  optimizers_.emplace(next_optimizer_, OptimizerOfRanks{std::move(all_reduce), ranks});
  return next_optimizer_++;
}

void Session::remove_optimizer(std::int64_t number) {
  MutexLock lock(mutex_);
  optimizers_.erase(number);
}

}  // namespace lockstep::horovod
