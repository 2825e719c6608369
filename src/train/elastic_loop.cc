#include "lockstep/train/elastic_loop.h"

#include <exception>
#include <optional>
#include <utility>

#include "base/text.h"
#include "checkpoint/state.h"
#include "lockstep/base/error.h"
#include "optimizer/rules.h"
#include "strategy/replicated_state.h"
#include "strategy/strategy_impl.h"
#include "train/signal_guard.h"
#include "train/training.h"

namespace lockstep {
namespace {

template <class Handle>
const auto& pointer(const Handle& handle) {
  return internal::Unwrap::pointer(handle);
}

// How far a loop has come.
struct Place {
  Position position;          // that of the next batch
  std::int64_t steps = 0;     // steps made
  std::int64_t sections = 0;  // sections completed: steps, and other calls
  std::int64_t seed = 0;      // the replicas' random numbers follow from it and `sections`

  Trackable trackable() {
    return checkpoint::compose({{"epoch", track(position.epoch)},
                                {"index", track(position.index)},
                                {"steps", track(steps)},
                                {"sections", track(sections)},
                                {"seed", track(seed)}});
  }
};

}  // namespace

class ElasticLoop::Impl final : public train::TrainingWorker {
 public:
  Impl(const Strategy& strategy, ReplicatedModule module, ReplicatedOptimizer optimizer,
       std::map<std::string, Trackable> objects)
      : TrainingWorker(unwrap(strategy), "the loop"),
        module_(std::move(module)),
        optimizer_(std::move(optimizer)),
        objects_(std::move(objects)) {
    place.seed = static_cast<std::int64_t>(this->strategy().seeds().next_of_loop());
  }

  Numbers run(const std::function<Numbers()>& act) {
    const auto seeded = [&] {
      begin_section();
      return act();
    };
    Numbers result;
    training_->run(seeded, [&](const Numbers& numbers) {
      ++place.sections;
      result = numbers;
    });
    return result;
  }

  bool walk(const DistributedDataset& data, std::size_t count, const std::function<Numbers(Batch&)>& step,
            const std::function<void(const Numbers&)>& done) {
    if (strategy().settings().worker_batch) {
      throw InvalidArgument("for_each: elastic.worker_batch is for fit; here the data set's batches are global");
    }
    if (strategy().workers().is_elastic() && data.is_sharded()) {
      throw InvalidArgument(
          "for_each: an elastic strategy needs a data set that all workers read: its auto_shard_policy must be "
          "AutoShardPolicy::data, and it must not come from distribute_from_function");
    }
    if (!take_part()) return false;
    if (waits) training_->wait_for_newcomers([] {});
    auto batches = data.iterate(place.position);
    while (auto batch = batches.next()) {
      make_step(batches, *batch, count, step, done);
      training_->change_workers([] {});
      const int signal = training_->signal();
      if (signal == 0) continue;
      end();
      throw Interrupted(signal);
    }
    place.position = {.epoch = place.position.epoch + 1};
    return true;
  }

  bool take_part() {
    if (takes_part_) return *takes_part_;
    unwrap(optimizer_).prepare();
    takes_part_ = training_->take_part([this] { return describe(); });
    return *takes_part_;
  }

  void end() { training_->end(); }

  std::int64_t steps() const override { return place.steps; }
  void set_steps(std::int64_t steps) override { place.steps = steps; }
  std::int64_t updates() const override { return unwrap(optimizer_).decided_steps(); }
  bool leaves_in_turn() const override { return unwrap(optimizer_).divides_state(); }
  void use_new_group() override { unwrap(optimizer_).regroup(); }
  void come_together() override { unwrap(optimizer_).come_together(); }
  void skip_update() override { unwrap(optimizer_).skip_step(); }

  Place place;

 private:
  void make_step(DistributedIterator& batches, Batch& batch, std::size_t count,
                 const std::function<Numbers(Batch&)>& step, const std::function<void(const Numbers&)>& done) {
    auto regroups = workers().regroups();
    Numbers found(count);  // zeros where the update was taken from another worker
    const auto act = [&] {
      begin_section();
      if (!training_->updated()) {
        if (std::exchange(regroups, workers().regroups()) != workers().regroups()) batch = batches.again();
        found.assign(count, 0);
        found = step(batch);
        if (!strategy().topology().counts()) found.assign(count, 0);  // another worker computed the same
        ++place.steps;
        training_->updated() = true;
      }
      return training_->sum_with_agreement(false, found);
    };
    training_->run(act, [&](const Numbers& sums) {
      const auto of_step = training_->take_agreement(sums);
      ++place.sections;
      place.position = batches.position();
      done({of_step.begin(), of_step.end()});
    });
  }

  // Gives a section its own random numbers, the same however often the section is made.
  void begin_section() {
    strategy().seeds().set(static_cast<std::uint64_t>(place.seed), static_cast<std::uint64_t>(place.sections));
  }

  const Communicator& workers() const { return strategy().topology().all; }

  std::string describe() const {
    std::string names;
    for (const auto& [name, object] : objects_) names += text("object ", name, "\n");
    const auto& gradients = unwrap(optimizer_);
    return text(strategy().describe(), "\n", unwrap(module_).describe_whole(), "optimizer ",
                optimizer::describe(gradients.updater().optimizer()), "\n", names);
  }

  Trackable update() override { return strategy::update_of(pointer(module_), pointer(optimizer_)); }
  Trackable part() override { return strategy::newcomers_part_of(pointer(module_), pointer(optimizer_)); }
  Trackable common() override {
    checkpoint::Parts objects(objects_.begin(), objects_.end());
    return checkpoint::compose({{"objects", checkpoint::compose(std::move(objects))}, {"loop", place.trackable()}});
  }

  const ReplicatedModule module_;
  const ReplicatedOptimizer optimizer_;
  const std::map<std::string, Trackable> objects_;
  train::SignalGuard signals_{true};
  const std::unique_ptr<train::Training> training_ = train::Training::of(*this, &signals_);
  std::optional<bool> takes_part_;  // false: a newcomer that came too late
};

ElasticLoop::ElasticLoop(const Strategy& strategy, const ReplicatedModule& module, const ReplicatedOptimizer& optimizer,
                         std::map<std::string, Trackable> objects)
    : impl_(std::make_unique<Impl>(strategy, module, optimizer, std::move(objects))),
      exceptions_before_(std::uncaught_exceptions()) {}

ElasticLoop::~ElasticLoop() {
  if (std::uncaught_exceptions() == exceptions_before_) impl_->end();
}

bool ElasticLoop::walk(const DistributedDataset& data, std::size_t count, const std::function<Numbers(Batch&)>& step,
                       const std::function<void(const Numbers&)>& done) {
  bool walked = false;
  impl_->strategy().workers().abort_on_error([&] { walked = impl_->walk(data, count, step, done); });
  return walked;
}

ElasticLoop::Numbers ElasticLoop::run_section(const std::function<Numbers()>& act) {
  Numbers result;
  impl_->strategy().workers().abort_on_error([&] { result = impl_->run(act); });
  return result;
}

Trackable ElasticLoop::trackable() {
  auto place = impl_->place.trackable();
  place.ranks = impl_->strategy().topology().all;
  return place;
}

std::int64_t ElasticLoop::steps() const { return impl_->steps(); }
Position ElasticLoop::position() const { return impl_->place.position; }

}  // namespace lockstep
