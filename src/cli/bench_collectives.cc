#include "cli/commands.h"

#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <ostream>
#include <thread>

#include <nlohmann/json.hpp>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/elastic/job.h"

extern char** environ;

namespace lockstep::cli {
namespace {

using Kind = Call::Kind;

constexpr double kMostSeconds = 3600;
constexpr DType kDTypesHere[] = {DType::float32, DType::float64, DType::int32, DType::int64, DType::uint8};

Deadline in_a_minute() { return Deadline::after(std::chrono::seconds(60)); }

Kind kind_named(const std::string& name) {
  for (int kind = 0; kind <= static_cast<int>(Kind::all_to_all); ++kind) {
    if (name == name_of(static_cast<Kind>(kind))) return static_cast<Kind>(kind);
  }
  throw InvalidArgument(text("there is no operation \"", name,
                             "\"; there are barrier, all_reduce, reduce, broadcast, "
                             "all_gather, gather, scatter, reduce_scatter and all_to_all"));
}

DType dtype_named(const std::string& name) {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    if (name == name_of(static_cast<DType>(dtype))) return static_cast<DType>(dtype);
  }
  throw InvalidArgument(text("there is no dtype \"", name, "\""));
}

// Bus bandwidth (what the busiest link carries) divided by algorithm bandwidth, as nccl-tests defines them.
double bus_factor(Kind kind, int ranks) {
  const double n = ranks;
  switch (kind) {
    case Kind::all_reduce: return 2 * (n - 1) / n;
    case Kind::all_gather:
    case Kind::reduce_scatter:
    case Kind::gather:
    case Kind::scatter:
    case Kind::all_to_all: return (n - 1) / n;
    default: return 1;
  }
}

// True where one of the operation's buffers has a part for each rank.
bool has_parts(Kind kind) { return bus_factor(kind, 4) == 0.75; }

// Bytes of the smallest buffer that the operation can have: an element, or one for each rank.
std::size_t least_bytes(const BenchOptions& options) {
  const auto ranks = has_parts(kind_named(options.operation)) ? static_cast<std::size_t>(options.ranks) : 1;
  return size_of(dtype_named(options.dtype)) * ranks;
}

// One size of one operation, on one rank: `bytes` is the larger of its buffers, as in nccl-tests.
class Trial {
 public:
  Trial(const Group& group, const BenchOptions& options, std::size_t bytes)
      : group_(group), kind_(kind_named(options.operation)), dtype_(dtype_named(options.dtype)) {
    const auto ranks = static_cast<std::size_t>(group.size());
    const bool parts = has_parts(kind_);
    each_ = bytes / size_of(dtype_) / (parts ? ranks : 1);
    whole_ = parts ? each_ * ranks : each_;
    memory_ = take(options, 2 * whole_ * size_of(dtype_));
    fill();
  }

  std::size_t bytes() const { return whole_ * size_of(dtype_); }

  void run() { group_.run(call_, in_a_minute()); }

  // Checks the first element of every rank's part, on the ranks that have a result.
  bool right() {
    fill();
    run();
    const auto& output = call_.output;
    const int parts = output.count == 0 ? 0 : output.count == whole_ && whole_ != each_ ? group_.size() : 1;
    for (int part = 0; part < parts; ++part) {
      const auto wanted = expected(part);
      if (wanted && element(output, static_cast<std::size_t>(part) * each_) != *wanted) return false;
    }
    return true;
  }

 private:
  // The elements of a part of the result; nothing where this rank has none.
  std::optional<double> expected(int part) const {
    const int size = group_.size();
    const double sum = size * (size + 1) / 2.0;
    const bool root = group_.rank() == 0;
    switch (kind_) {
      case Kind::all_reduce:
      case Kind::reduce_scatter: return sum;
      case Kind::reduce: return root ? std::optional(sum) : std::nullopt;
      case Kind::broadcast:
      case Kind::scatter: return 1;
      case Kind::gather: return root ? std::optional<double>(part + 1) : std::nullopt;
      case Kind::all_gather:
      case Kind::all_to_all: return part + 1;
      default: return std::nullopt;
    }
  }

  Memory take(const BenchOptions& options, std::size_t bytes) const {
    if (!options.any_buffer) return group_.allocate(bytes);
    return {new (std::align_val_t{64}) std::byte[bytes](),
            [](std::byte* memory) { operator delete[](memory, std::align_val_t{64}); }};
  }

  // Rank r's input is r + 1 everywhere; outputs that are not inputs are zeros.
  void fill() {
    const auto element_bytes = size_of(dtype_);
    const Buffer first{memory_.get(), whole_, dtype_};
    const Buffer second{memory_.get() + whole_ * element_bytes, whole_, dtype_};
    const Buffer part{first.data, each_, dtype_}, other_part{second.data, each_, dtype_};
    for (std::size_t i = 0; i < whole_; ++i) set(first, i, group_.rank() + 1);
    switch (kind_) {
      case Kind::barrier: call_ = Call::barrier(); break;
      case Kind::all_reduce: call_ = Call::all_reduce(first, ReduceOp::sum); break;
      case Kind::reduce: call_ = Call::reduce(first, second, ReduceOp::sum, 0); break;
      case Kind::broadcast: call_ = Call::broadcast(first, 0); break;
      case Kind::all_gather: call_ = Call::all_gather(part, second); break;
      case Kind::gather: call_ = Call::gather(part, second, 0); break;
      case Kind::scatter: call_ = Call::scatter(first, other_part, 0); break;
      case Kind::reduce_scatter: call_ = Call::reduce_scatter(first, other_part, ReduceOp::sum); break;
      default: call_ = Call::all_to_all(first, second); break;
    }
  }

  template <class Act>
  auto visit(const Act& act) const {
    switch (dtype_) {
      case DType::float64: return act(double());
      case DType::int32: return act(std::int32_t());
      case DType::int64: return act(std::int64_t());
      case DType::uint8: return act(std::uint8_t());
      case DType::float32: break;
      default: throw InvalidArgument(text("the benchmark has no dtype ", name_of(dtype_)));
    }
    return act(float());
  }

  void set(const Buffer& buffer, std::size_t index, int value) const {
    visit([&]<class T>(T) { static_cast<T*>(buffer.data)[index] = static_cast<T>(value); });
  }

  double element(const Buffer& buffer, std::size_t index) const {
    return visit([&]<class T>(T) { return static_cast<double>(static_cast<T*>(buffer.data)[index]); });
  }

  const Group& group_;
  const Kind kind_;
  const DType dtype_;
  std::size_t each_ = 0, whole_ = 0;
  Memory memory_;
  Call call_;
};

// Runs equally many rounds on all ranks, for about `seconds`. Returns the slowest rank's microseconds a round.
double measure(const Group& group, Trial& trial, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto timed = [&](std::int64_t rounds) {
    group.barrier(in_a_minute());
    const auto start = Clock::now();
    for (std::int64_t i = 0; i < rounds; ++i) trial.run();
    double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    group.all_reduce(buffer_of(std::span(&elapsed, 1)), ReduceOp::max, in_a_minute());
    return elapsed;
  };
  constexpr int kWarmUp = 5;
  const double one = timed(kWarmUp) / kWarmUp;
  const auto rounds = std::clamp<std::int64_t>(std::llround(seconds / std::max(one, 1e-9)), 3, 1'000'000);
  return timed(rounds) / static_cast<double>(rounds) * 1e6;
}

// Pins each rank to a core, as mpirun does, where there are enough.
void pin(int rank, int ranks) {
  const auto cpus = cpus_by_place(allowed_cpus());
  if (static_cast<std::size_t>(ranks) <= cpus.size())
    pin_current_thread(std::span(cpus).subspan(static_cast<std::size_t>(rank), 1));
}

// Returns whether all results were right.
bool run_rank(const Group& group, const BenchOptions& options, std::ostream* out) {
  pin(group.rank(), group.size());
  const auto kind = kind_named(options.operation);
  nlohmann::json microseconds;
  bool all_right = true;
  if (out != nullptr) {
    *out << options.operation << ", " << options.dtype << ", " << group.size() << " ranks, " << group.backend() << "\n"
         << std::setw(12) << "bytes" << std::setw(14) << "time us" << std::setw(14) << "algbw GB/s" << std::setw(14)
         << "busbw GB/s" << std::setw(10) << "result"
         << "\n";
  }
  for (const auto size : options.sizes) {
    Trial trial(group, options, size);
    float wrong = trial.right() ? 0 : 1;
    group.all_reduce(buffer_of(std::span(&wrong, 1)), ReduceOp::sum, in_a_minute());
    const double us = measure(group, trial, options.seconds);
    all_right = all_right && wrong == 0;
    if (out == nullptr) continue;
    const double bandwidth = static_cast<double>(trial.bytes()) / us / 1e3;
    *out << std::setw(12) << trial.bytes() << std::setw(14) << std::fixed << std::setprecision(2) << us << std::setw(14)
         << bandwidth << std::setw(14) << bandwidth * bus_factor(kind, group.size()) << std::setw(10)
         << (wrong == 0 ? "right" : "WRONG") << std::endl;
    microseconds[std::to_string(size)] = std::round(us * 100) / 100;
  }
  if (out != nullptr) {
    *out << nlohmann::json{{"operation", options.operation},   {"backend", group.backend()}, {"ranks", group.size()},
                           {"any_buffer", options.any_buffer}, {"right", all_right},         {"us", microseconds}}
         << std::endl;
  }
  return all_right;
}

int run_threads(const BenchOptions& options, std::ostream& out) {
  const auto groups = make_thread_groups(options.ranks, options.ranks <= usable_cpu_count() ? 4000 : 0);
  std::atomic<bool> right{true};
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < options.ranks; ++rank) {
      threads.emplace_back([&, rank] {
        if (!run_rank(groups[static_cast<std::size_t>(rank)], options, rank == 0 ? &out : nullptr)) right = false;
      });
    }
  }
  return right ? 0 : 1;
}

// Starts this program again, as rank `rank`.
pid_t start_rank(const BenchOptions& options, int rank, const std::string& store) {
  auto arguments = options.command;
  const auto per_host =
      options.ranks_per_host.empty() ? options.ranks : whole_number<int>(options.ranks_per_host).value_or(0);
  if (per_host < 1) {
    throw InvalidArgument(text("--ranks-per-host is ", options.ranks_per_host, "; it must be a number from 1 on"));
  }
  for (const auto& argument : {text("--rank=", rank), text("--store=", store), text("--host=host-", rank / per_host)}) {
    arguments.push_back(argument);
  }
  pid_t process = 0;
  const int error = posix_spawn(&process, "/proc/self/exe", nullptr, nullptr, pointers_to(arguments).data(), environ);
  if (error != 0) throw ClusterError(text("cannot start rank ", rank, ": ", std::strerror(error)));
  return process;
}

int run_processes(const BenchOptions& options) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<pid_t> processes;
  for (int rank = 0; rank < options.ranks; ++rank) processes.push_back(start_rank(options, rank, store.address()));
  int status = 0;
  for (const auto process : processes) {
    int ended = 0;
    waitpid(process, &ended, 0);
    if (ended != 0) status = 1;
  }
  return status;
}

// Ranks of MPI are processes of its launcher.
int run_launched(const Job& job, const BenchOptions& options, std::ostream& out) {
  const auto group = job.group(options.group);
  return run_rank(group, options, group.rank() == 0 ? &out : nullptr) ? 0 : 1;
}

}  // namespace

int bench_collectives(BenchOptions options, std::ostream& out) {
  std::optional<Job> job;
  if (options.group.backend == "mpi" && !options.world) {
    job = Job::from_environment();
    options.ranks = job->size();
    if (options.ranks == 1) {
      throw InvalidArgument("the backend \"mpi\" needs ranks: mpirun -np 2 lockstep bench collectives --backend mpi");
    }
  }
  if (options.ranks < 1) throw InvalidArgument(text("--ranks is ", options.ranks, "; it must be at least 1"));
  if (!(options.seconds > 0 && options.seconds <= kMostSeconds)) {
    throw InvalidArgument(
        text("--seconds is ", options.seconds, "; it must be above 0 and at most ", kMostSeconds, " seconds"));
  }
  if (std::find(std::begin(kDTypesHere), std::end(kDTypesHere), dtype_named(options.dtype)) == std::end(kDTypesHere))
    throw InvalidArgument(text("--dtype is ", options.dtype, "; it must be float32, float64, int32, int64 or uint8"));
  const auto least = least_bytes(options);
  for (const auto size : options.sizes) {
    if (size >= least) continue;
    throw InvalidArgument(text("--sizes has ", size, " bytes; ", options.operation, " of ", options.ranks,
                               " ranks and ", options.dtype, " needs at least ", least));
  }
  if (options.sizes.empty()) {
    for (const std::size_t size : {4, 4096, 65536, 1388584, 16 << 20, 64 << 20})
      options.sizes.push_back(std::max(size, least));
  }
  if (job) return run_launched(*job, options, out);
  if (options.group.backend == "threads") return run_threads(options, out);
  if (!options.world) return run_processes(options);
  const auto store = options.hold_store ? Store::hold(options.store) : Store::connect(options.store, in_a_minute());
  const auto group = make_group(*options.world, store, options.group);
  return run_rank(group, options, group.rank() == 0 ? &out : nullptr) ? 0 : 1;
}

}  // namespace lockstep::cli
