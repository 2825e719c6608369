// Horovod Elastic: a loop of your own that goes on from its last commit when ranks are lost, leave and come. Names and
// their meaning are those of horovod.torch.elastic. Include lockstep/horovod.h.
//
//   hvd::init();
//   torch::optim::SGD sgd(net->parameters(), 0.01 * hvd::size());
//   hvd::DistributedOptimizer optimizer(sgd);
//   hvd::elastic::ElasticSampler sampler(examples);
//   std::int64_t epoch = 0;
//   hvd::elastic::TorchState state(*net, sgd, {{"epoch", ls::track(epoch)}, {"sampler", sampler.trackable()}});
//   state.register_reset_callbacks({[&] { set_learning_rate(sgd, 0.01 * hvd::size()); }});
//   const auto train = hvd::elastic::run([&](hvd::elastic::State& state) {
//     for (; epoch < 10; sampler.set_epoch(++epoch)) {
//       for (std::int64_t batch = 0; batch < sampler.batches(32); ++batch) {
//         step(sampler.get_indices(batch, 32));
//         sampler.record_batch(batch, 32);
//         state.commit();
//       }
//     }
//   });
//   train(state);
//
// For jobs of `lockstep run --min-n`; elsewhere a rank that is lost ends the others, as without it. A rank that comes
// to a job that runs waits in hvd::init until the others take it in, at their next commit. Between init and train it
// must make no collective calls but those of DistributedOptimizer's constructor. A DistributedOptimizer stays, whatever
// ranks come and go. After a loss, a rank that makes no collective call for InitOptions::regroup_seconds is left out.
// `fit` is elastic only with MultiWorkerMirroredStrategy.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod::elastic {

// Ranks have come, or leave: thrown on all by the same commit or check_host_updates. `run` catches it.
class HostsUpdatedInterrupt : public Error {
 public:
  using Error::Error;
};

// The state that ranks have in common, and the copy that the last commit made. One thread.
class State {
 public:
  virtual ~State() = default;

  // Called after the ranks have changed, when rank() and size() are the new ones, before `sync`: for learning rates
  // that depend on them.
  void register_reset_callbacks(std::vector<std::function<void()>> callbacks);

  // Waits for what GPUs still sum, copies the state in memory, and checks. Where a rank is lost, the steps since the
  // last commit are done again.
  void commit();

  // Collective. Throws HostsUpdatedInterrupt where ranks have come or one that got SIGTERM is to leave, and Interrupted
  // where all got SIGTERM, or one got SIGINT.
  void check_host_updates();

  virtual void save() = 0;     // copies the state
  virtual void restore() = 0;  // takes the copy
  virtual void sync() = 0;     // collective: takes the state of a rank that has committed most often, and copies it

  virtual void reset() {}  // as a reset callback, before those
  void on_reset();

 protected:
  // Collective. Returns the lowest of the ranks that committed most often; `sync` gives all ranks its number of
  // commits. Throws ClusterError where all ranks that had the state were lost.
  int newest_rank();

 private:
  friend std::function<void(State& state)> run(std::function<void(State& state)> train);
  std::vector<std::function<void()>> callbacks_;
  std::int64_t commits_ = 0, newest_ = 0;
};

// Numbers of the loop (lockstep::track), samplers and other objects. They must outlive it.
class ObjectState : public State {
 public:
  explicit ObjectState(std::map<std::string, Trackable> objects);
  void save() override;
  void restore() override;
  void sync() override;

 protected:
  void sync_from(int root);

 private:
  const Trackable all_;
  std::string saved_;
};

// An ObjectState with a module and its optimizer (not the DistributedOptimizer around it). Throws InvalidArgument in
// `sync` for torch::optim::LBFGS.
class TorchState : public ObjectState {
 public:
  TorchState(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
             std::map<std::string, Trackable> objects = {});
  ~TorchState() override;
  void save() override;
  void restore() override;
  void sync() override;

 private:
  struct Copy;
  torch::nn::Module& module_;
  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<Copy> copy_;
};

// Divides the indices 0 to dataset_size - 1 among the ranks. When ranks change, it divides those that no batch has used
// yet anew. All ranks make the same calls. As in Horovod, the first indices come twice where ranks do not divide them.
class ElasticSampler {
 public:
  explicit ElasticSampler(std::int64_t dataset_size, bool shuffle = true, std::uint64_t seed = 0);

  // At the end of an epoch, not at its beginning: all indices count as unused again.
  void set_epoch(std::int64_t epoch);

  // Marks this rank's batches of this size as done, up to number `batch` since the ranks last changed.
  void record_batch(std::int64_t batch, std::int64_t batch_size);

  // Return this rank's indices, and those of one of its batches, fewer in the last one.
  const std::vector<std::int64_t>& indices() const { return indices_; }
  std::vector<std::int64_t> get_indices(std::int64_t batch, std::int64_t batch_size) const;
  std::int64_t batches(std::int64_t batch_size) const;

  // Divides the unused indices among the present ranks. Loading from `trackable` does so too.
  void reset();

  Trackable trackable();

 private:
  const std::int64_t dataset_size_;
  const bool shuffle_;
  const std::uint64_t seed_;
  std::int64_t epoch_ = 0;
  std::int64_t processed_ = 0, processed_before_ = 0;  // of all ranks; when the ranks last changed
  std::vector<std::int64_t> indices_;
};

// Returns a function that calls `train`. Where ranks are lost it calls `train` again from the last commit; where they
// come or leave, from where the state was. A rank that leaves throws Interrupted. A program calls one such function,
// once.
std::function<void(State& state)> run(std::function<void(State& state)> train);

}  // namespace lockstep::horovod::elastic
