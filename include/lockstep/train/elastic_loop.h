// ElasticLoop: a loop of your own that goes on when workers are lost, leave and come, as fit does by itself.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/strategy/distributed_dataset.h"
#include "lockstep/strategy/replicated.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

// For an elastic MultiWorkerMirroredStrategy or ModelParallelStrategy (ElasticOptions); with other strategies the loop
// is an ordinary one.
//
//   double loss = 0;
//   std::int64_t epoch = 0;
//   ls::ElasticLoop loop(strategy, net, optimizer, {{"loss", ls::track(loss)}, {"epoch", ls::track(epoch)}});
//   for (; epoch < 2; ++epoch) {
//     loop.for_each(train_data, [&](auto& batch) { return strategy.run(train_step, net, batch); },
//                   [&](double sum) { loss += sum; });
//     const double accuracy = loop.run([&] { return evaluate(strategy, net, test_data); });
//   }
//
// When a worker is lost in a call of this object, the others regroup and go on. They take an update that one of them
// has made and they have not; where nobody has, they divide the batch anew. When one is lost elsewhere, the next call
// notices. A newcomer runs the program from its beginning to its first for_each. There it gets the others' state and
// position, and goes on with them. So a newcomer also does once, alone, what comes before for_each in the loop's body.
// A worker that gets SIGTERM leaves after its step; when all get SIGINT or SIGTERM, all stop after the same one.
//
// One thread, outside of Strategy::run. While an ElasticLoop lives it handles SIGINT and SIGTERM. When it is destroyed
// other than by an exception, the training has ended, and no newcomer is taken in any more.
class ElasticLoop {
 public:
  // Each step makes one update, of `optimizer`. `objects`: all else that the loop changes, for newcomers; they must
  // outlive this. All workers, and newcomers, must give the same ones.
  ElasticLoop(const Strategy& strategy, const ReplicatedModule& module, const ReplicatedOptimizer& optimizer,
              std::map<std::string, Trackable> objects = {});
  ~ElasticLoop();
  ElasticLoop(const ElasticLoop&) = delete;
  ElasticLoop& operator=(const ElasticLoop&) = delete;

  // Walks the next epoch of the data set, which is always the same. `step(batch)` makes a step on the replicas and
  // returns their numbers: a PerReplica of double or of std::array<double, N>. `done(sums)` gets the sums over the
  // replicas of all workers, on a mesh one of those with the same examples, once for each step, and must not
  // communicate.
  //
  // Where a worker is lost between an update and these sums, its part of them may be missing, but not of the update.
  //
  // False, and nothing is done, on a newcomer that has come after the training ended.
  //
  // Throws what `step` throws. The others of an elastic strategy then go on without this worker, whose machine may be
  // at fault. Where a second one throws in the same step, all do, as those of other strategies. Throws InvalidArgument
  // where an elastic strategy's workers do not all read the same data (AutoShardPolicy::data). Throws ClusterError
  // where fewer than min_workers are left and none come, and Interrupted. Throws StateLost, on all, where workers were
  // lost together that alone had a part of a sharded optimizer's state. Load a checkpoint of everything then, the loop
  // too, and call for_each again.
  template <class Step, class Done>
  bool for_each(const DistributedDataset& data, const Step& step, const Done& done);

  // Anything else in which the workers communicate, such as an evaluation. act() returns a double or a vector of them,
  // equal on all workers, as Strategy::reduce does. It is called again where a worker is lost meanwhile, so it must
  // begin anew. A newcomer that has not joined yet calls it alone.
  template <class Act>
  auto run(const Act& act);

  // Where the loop is in the data, for a Checkpoint.
  Trackable trackable();

  std::int64_t steps() const;  // made so far
  Position position() const;   // of the next batch

 private:
  using Numbers = std::vector<double>;
  using Batch = PerReplica<Example>;
  static constexpr std::size_t count_of(double) { return 1; }
  template <std::size_t N>
  static constexpr std::size_t count_of(const std::array<double, N>&) {
    return N;
  }
  static void add(double value, Numbers& sums) { sums[0] += value; }
  template <std::size_t N>
  static void add(const std::array<double, N>& values, Numbers& sums) {
    for (std::size_t i = 0; i < N; ++i) sums[i] += values[i];
  }

  bool walk(const DistributedDataset& data, std::size_t count, const std::function<Numbers(Batch&)>& step,
            const std::function<void(const Numbers&)>& done);
  Numbers run_section(const std::function<Numbers()>& act);

  class Impl;
  std::unique_ptr<Impl> impl_;
  const int exceptions_before_;
};

template <class Step, class Done>
bool ElasticLoop::for_each(const DistributedDataset& data, const Step& step, const Done& done) {
  using Found = std::remove_cvref_t<decltype(step(std::declval<Batch&>())[0])>;
  constexpr auto count = count_of(Found{});
  const auto sum_here = [&](Batch& batch) {
    Numbers sums(count);
    for (const auto& found : step(batch)) add(found, sums);
    return sums;
  };
  return walk(data, count, sum_here, [&](const Numbers& sums) {
    if constexpr (std::is_same_v<Found, double>) {
      done(sums[0]);
    } else {
      Found all;
      std::copy(sums.begin(), sums.end(), all.begin());
      done(all);
    }
  });
}

template <class Act>
auto ElasticLoop::run(const Act& act) {
  if constexpr (std::is_convertible_v<decltype(act()), double>) {
    return run_section([&] { return Numbers{act()}; })[0];
  } else {
    return run_section(act);
  }
}

}  // namespace lockstep
