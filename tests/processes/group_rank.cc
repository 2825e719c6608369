// One rank of a Group in a process of its own, for faults_test. It calls operations until something goes wrong, says
// what it saw, and goes on with the ranks that are left. It prints a line a fact:
//   threw PeerLost 2 after 0.013: lost rank 2 ...
//   again right
//   left 0 descriptors and 0 threads
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <numeric>
#include <random>
#include <thread>

#include "../../examples/arguments.h"
#include "base/text.h"
#include "lockstep/collective/group_wrappers.h"
#include "lockstep/collective/make_group.h"

using namespace lockstep;

namespace {

struct Options {
  World world;
  std::string store;
  GroupOptions group;
  double deadline = 5;
  int victim = -1;
  Fault fault;
  std::string action = "kill";
  std::string buffers = "shared";
  unsigned seed = 0;  // of the operations; 0: all_reduces of 300,000 floats
  int calls = 20;
};

std::size_t entries(const char* folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

// A thread that was joined is among the process's for a moment still.
void start_and_end_a_thread() {
  pid_t thread = 0;
  std::thread([&] { thread = gettid(); }).join();
  while (std::filesystem::exists(text("/proc/self/task/", thread))) std::this_thread::yield();
}

Fault::Action action_named(const std::string& name) {
  const std::string names[] = {"delay", "kill", "stop", "abort", "error"};
  for (int i = 0; i < 5; ++i) {
    if (name == names[i]) return static_cast<Fault::Action>(i);
  }
  throw InvalidArgument("no such action: " + name);
}

// Operations that are the same on all ranks of a seed.
class Program {
 public:
  Program(const Group& group, const Options& options) : group_(group), options_(options), random_(options.seed) {}

  void run() {
    for (int i = 0; i < options_.calls; ++i) {
      options_.seed == 0 ? all_reduce(300'000) : any();
    }
  }

 private:
  Deadline deadline() const { return Deadline::after(std::chrono::duration<double>(options_.deadline)); }

  std::vector<float>& filled(std::size_t count, float value) {
    values_.assign(count, value);
    return values_;
  }

  static void require(bool right, const char* what) {
    if (!right) throw Error(std::string("a wrong result of ") + what);
  }

  void all_reduce(std::size_t count) {
    const float expected = static_cast<float>(group_.size() * (group_.size() + 1) / 2);
    if (options_.buffers == "shared") {
      const auto memory = group_.allocate(count * sizeof(float));
      const std::span values(reinterpret_cast<float*>(memory.get()), count);
      std::fill(values.begin(), values.end(), static_cast<float>(group_.rank() + 1));
      group_.all_reduce(buffer_of(values), ReduceOp::sum, deadline());
      require(values[0] == expected && values[count - 1] == expected, "all_reduce");
    } else {
      auto& values = filled(count, static_cast<float>(group_.rank() + 1));
      group_.all_reduce(buffer_of(std::span(values)), ReduceOp::sum, deadline());
      require(values[0] == expected && values[count - 1] == expected, "all_reduce");
    }
  }

  void any() {
    const auto kind = random_() % 6;
    const std::size_t count = std::size_t{1} << (random_() % 19);
    const int root = static_cast<int>(random_() % static_cast<unsigned>(group_.size()));
    if (kind == 0) return group_.barrier(deadline());
    if (kind == 1) {
      auto& values = filled(count, static_cast<float>(group_.rank()));
      group_.broadcast(buffer_of(std::span(values)), root, deadline());
      return require(values[count / 2] == static_cast<float>(root), "broadcast");
    }
    if (kind == 2) {
      std::vector<float> all(count * static_cast<std::size_t>(group_.size()));
      auto& values = filled(count, static_cast<float>(group_.rank()));
      group_.all_gather(buffer_of(std::span(values)), buffer_of(std::span(all)), deadline());
      return require(all[count * static_cast<std::size_t>(root)] == static_cast<float>(root), "all_gather");
    }
    if (kind == 3) {
      auto& values = filled(count, 1);
      const auto work = group_.start(Call::all_reduce(buffer_of(std::span(values)), ReduceOp::sum), deadline());
      group_.barrier(deadline());
      work.wait();
      return require(values[count - 1] == static_cast<float>(group_.size()), "a started all_reduce");
    }
    all_reduce(count);
  }

  const Group& group_;
  const Options& options_;
  std::mt19937 random_;
  std::vector<float> values_;
};

// The ranks to do without, or nothing where all went well.
std::vector<int> first_life(const Options& options, const Store& store) {
  const bool victim = options.world.rank == options.victim;
  const auto begin = Deadline::after(std::chrono::seconds(0));
  const auto seconds = [&] { return text(" after ", begin.waited().count(), ": "); };
  try {  // what happens in another rank's first call may be heard while this one still makes the group
    const auto made = make_group(options.world, store, options.group);
    std::cout << "made" << std::endl;
    const auto group = victim ? with_faults(made, {options.fault}) : made;
    Program(group, options).run();
    std::cout << "threw nothing" << std::endl;
    return {};
  } catch (const PeerLost& error) {
    std::cout << "threw PeerLost " << error.rank() << seconds() << error.what() << std::endl;
    return {error.rank()};
  } catch (const DeadlineExceeded& error) {
    std::cout << "threw DeadlineExceeded " << join(error.ranks(), " ") << seconds() << error.what() << std::endl;
    return error.ranks();
  } catch (const Aborted& error) {
    std::cout << "threw Aborted" << seconds() << error.what() << std::endl;
  } catch (const Error& error) {
    std::cout << "threw Error" << seconds() << error.what() << std::endl;
  }
  return {};
}

void second_life(const Options& options, const Store& store, int gone) {
  if (options.world.rank == gone) return;
  auto world = options.world;
  world.generation = 1;
  --world.size;
  if (world.rank > gone) --world.rank;
  auto made = options.group;
  made.timeout_seconds = 20;
  const auto group = make_group(world, store, made);
  std::int64_t one = 1;
  group.all_reduce(buffer_of(std::span(&one, 1)), ReduceOp::sum, Deadline::after(std::chrono::seconds(20)));
  std::cout << "again " << (one == world.size ? "right" : "WRONG") << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("one rank");
  options.group.timeout_seconds = 20;
  arguments.option("--rank", options.world.rank);
  arguments.option("--size", options.world.size);
  arguments.option("--host", options.world.host);
  arguments.option("--address", options.world.address);
  arguments.option("--store", options.store);
  arguments.option("--backend", options.group.backend);
  arguments.option("--network", options.group.network);
  arguments.option("--deadline", options.deadline);
  arguments.option("--victim", options.victim);
  arguments.option("--call", options.fault.call);
  arguments.option("--place", options.fault.place);
  arguments.option("--action", options.action);
  arguments.option("--seconds", options.fault.seconds);
  arguments.option("--buffers", options.buffers);
  arguments.option("--seed", options.seed);
  arguments.option("--calls", options.calls);
  arguments.option("--timeout", options.group.timeout_seconds);
  arguments.parse(argc, argv);
  try {
    options.fault.action = action_named(options.action);
    if (options.fault.place == "begin") options.fault.place.clear();
    options.group.heap_bytes = 64 << 20;
    options.group.checked_calls = 2;  // faults come to calls that are checked, and to others
    const auto store = Store::connect(options.store, Deadline::after(std::chrono::seconds(20)));
    start_and_end_a_thread();  // with the first thread the thread sanitizer starts one of its own
    const auto descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
    const auto lost = first_life(options, store);
    if (lost.size() == 1) second_life(options, store, lost[0]);
    std::cout << "left " << entries("/proc/self/fd") - descriptors << " descriptors and "
              << entries("/proc/self/task") - threads << " threads" << std::endl;
  } catch (const std::exception& error) {
    std::cout << "failed: " << error.what() << std::endl;
    return 1;
  }
}
