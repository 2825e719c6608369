// Steps that this process makes, with its peers.
#include <algorithm>
#include <chrono>
#include <exception>

#include "base/text.h"
#include "collective/refused_by_all.h"
#include "lockstep/base/error.h"
#include "strategy/split.h"
#include "train/execution.h"
#include "train/model_impl.h"
#include "train/step_source.h"

namespace lockstep::train {
namespace {

class LocalSteps final : public StepSource {
 public:
  LocalSteps(ModelImpl& impl, const Dataset& data, const FitOptions& options)
      : impl_(impl), data_(data), options_(options) {}

  std::int64_t steps_of_an_epoch() override {
    if (options_.steps_per_epoch == FitOptions::kEndless) return -1;
    if (options_.steps_per_epoch > 0) return options_.steps_per_epoch;
    const auto mine = std::max<std::int64_t>(-1, distributed().cardinality());
    return impl_.topology.has_own_data() ? longest(mine) : mine;
  }

  // With steps_per_epoch, one iterator serves all epochs.
  void begin_epoch() override {
    stopped_ = false;
    if (iterator_ && options_.steps_per_epoch > 0) return;
    ahead_.reset();
    const auto data = distributed();
    if (restored_with_other_batch_size(data)) {
      iterator_.emplace(data.iterate_from({progress().position.epoch, progress().examples}));
      progress().batch_size = 0;
    } else {
      iterator_.emplace(data.iterate(progress().position));
    }
    examples_before_ = progress().examples;
  }

  bool next(const std::function<bool()>& /*interrupted*/) override {
    if (stopped_) return false;
    auto ahead = std::exchange(ahead_, {});
    if (ahead && ahead->error) std::rethrow_exception(ahead->error);
    read_ = ahead ? *std::move(ahead) : read(progress().batch);
    results_.clear();
    regroups_ = peers().regroups();
    return !read_.batches.empty();
  }

  void train() override {
    if (std::exchange(regroups_, peers().regroups()) != peers().regroups())
      read_ = as_read_now({iterator_->parts_again()}, read_.first_size);
    impl_.gradients->updater().set_learning_rate_factor(unwrap(impl_.strategy).workers().learning_rate_factor());
    results_ = impl_.execution->train(read_.batches, *impl_.state.tracker, std::move(read_.prepared),
                                      [this] { read_ahead(); });
  }

  std::vector<double> sum(std::span<const double> news) override {
    earlier_.clear();
    for (std::size_t i = 0; i + 1 < results_.size(); ++i)
      earlier_.push_back(impl_.state.tracker->sum_batch(&results_[i], {}));
    auto sums = impl_.state.tracker->sum_batch(results_.empty() ? nullptr : &results_.back(), news);
    if (impl_.topology.has_peers_with_own_models()) peers().sum(std::span(sums).last(news.size()));
    compare_batches(progress().batch + 1);
    return sums;
  }

  void count(std::span<const double> sums) override {
    for (const auto& of_batch : earlier_) impl_.state.tracker->count_batch(of_batch);
    impl_.state.tracker->count_batch(sums);
    progress().batch += static_cast<std::int64_t>(read_.batches.size());
    if (progress().position.index == 0) progress().batch_size = largest_of_readers(read_.first_size);
    progress().position = read_.position;
    progress().examples = examples_before_ + read_.examples;
  }

  void stop() override { stopped_ = true; }

 private:
  FitProgress& progress() const { return impl_.state.progress; }
  const Communicator& peers() const { return impl_.topology.peers; }

  // The batches of a step, or of those that are launched together, and where the data set is after them.
  struct Read {
    std::vector<PerReplica<internal::Part>> batches = {};
    std::int64_t first_size = 0;  // the first one's, before it was divided
    Position position = {};
    std::int64_t examples = 0;
    std::optional<std::uint64_t> hash = {};  // the last batch's, where others are read before it is compared
    std::unique_ptr<Execution::Prepared> prepared = {};
    std::exception_ptr error = {};  // of reading them
  };

  // Reads a step's batches; `trained` batches of the epoch come before them.
  Read read(std::int64_t trained) {
    const auto before = std::chrono::steady_clock::now();
    auto most = impl_.compiled->steps_per_execution;
    if (options_.steps_per_epoch > 0) most = std::min(most, options_.steps_per_epoch - trained);
    std::vector<PerReplica<internal::Part>> batches;
    std::int64_t first_size = 0;
    while (static_cast<std::int64_t>(batches.size()) < most) {
      auto batch = iterator_->next_parts();
      if (!batch) break;
      if (batches.empty()) first_size = iterator_->element_size();
      batches.push_back(*std::move(batch));
    }
    impl_.times.input += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    return as_read_now(std::move(batches), first_size);
  }

  Read as_read_now(std::vector<PerReplica<internal::Part>> batches, std::int64_t first_size) const {
    return {.batches = std::move(batches),
            .first_size = first_size,
            .position = iterator_->position(),
            .examples = iterator_->examples(),
            .hash = impl_.execution->reads_ahead() && reads_what_others_read()
                        ? std::optional(iterator_->element_hash())
                        : std::nullopt};
  }

  // Reads the next step's batches, which are copied to the devices while these compute this one. An error is thrown
  // when their turn comes; with several workers at once, since others may wait for this one.
  void read_ahead() {
    const auto trained = progress().batch + static_cast<std::int64_t>(read_.batches.size());
    if (options_.steps_per_epoch > 0 && trained >= options_.steps_per_epoch) return;
    try {
      ahead_ = read(trained);
      if (!ahead_->batches.empty()) ahead_->prepared = impl_.execution->prepare(ahead_->batches);
    } catch (...) {
      if (peers().size() > 1) throw;
      ahead_ = Read{.error = std::current_exception()};
    }
  }

  DistributedDataset distributed() const {
    const bool of_workers = unwrap(impl_.strategy).settings().worker_batch.has_value();
    return strategy::distribute_ahead(data_, impl_.replicas(),
                                      of_workers ? std::optional(Distribution::one_a_worker) : std::nullopt);
  }

  // Returns the steps of the longest of the ranks' epochs; -1 where a rank does not know its own.
  std::int64_t longest(std::int64_t steps) const {
    for (const auto& theirs : peers().all_gather(std::to_string(steps))) {
      const auto other = std::stoll(theirs);
      steps = std::min<std::int64_t>(steps, other) < 0 ? -1 : std::max<std::int64_t>(steps, other);
    }
    return steps;
  }

  bool reads_what_others_read() const { return peers().size() > 1 && !iterator_->is_sharded(); }

  // Checks that workers that must read the same batches do so: in the first step of each epoch, and as often as their
  // copies are compared.
  void compare_batches(std::int64_t batch) const {
    const auto every = impl_.gradients->compare_copies_every();
    if (!reads_what_others_read() || every == 0) return;
    if (batch != 1 && impl_.state.steps % every != 0) return;
    peers().check_all_agree("data", text("a batch with the hash ", read_.hash.value_or(iterator_->element_hash()),
                                         " at step ", batch, " of epoch ", progress().epoch + 1));
  }

  // Returns true where the restored position counts batches of another size, so that it must be found by examples.
  // Throws where it cannot be found in this data.
  bool restored_with_other_batch_size(const DistributedDataset& data) {
    const auto local = impl_.replicas();
    const int readers = data.is_sharded() ? local.workers.size() : 1;
    auto& now = progress();
    const int readers_then = std::exchange(now.readers, readers);
    if (now.position.index == 0) {
      now.batch_size = 0;  // set after the first step
      return false;
    }
    if (readers != readers_then) {
      throw InvalidArgument(
          text("fit: the checkpoint was made in the middle of an epoch in which ", workers_that_read(readers_then),
               ", and now ", workers_that_read(readers), ", so that some examples would be left out and others come ",
               "twice; go on with as many workers and the same auto_shard_policy, or, without steps_per_epoch, from ",
               "the end of an epoch"));
    }
    if (impl_.topology.has_own_data()) return false;  // each rank has batches and a position of its own
    const auto size = largest_of_readers(strategy::first_element(data_, local, now.position.epoch).size());
    if (size == now.batch_size) return false;
    if (readers > 1) {
      throw InvalidArgument(text("fit: the checkpoint was made with batches of ", now.batch_size, " examples, and now ",
                                 "they have ", size, "; where each of ", readers, " workers reads its own, the place ",
                                 "in the data cannot be found: go on with batches of ", now.batch_size,
                                 ", or, without steps_per_epoch, from the end of an epoch"));
    }
    if (options_.steps_per_epoch == 0 && size > 0) now.batch = (now.examples + size - 1) / size;
    return true;
  }

  // Returns the largest size on any worker: where workers read their own batches, one may have less than a full batch.
  std::int64_t largest_of_readers(std::int64_t size) const {
    if (progress().readers == 1) return size;
    for (const auto& theirs : peers().all_gather(std::to_string(size)))
      size = std::max<std::int64_t>(size, std::stoll(theirs));
    return size;
  }

  static std::string workers_that_read(int readers) {
    return readers == 1 ? "all workers read the same batches" : text(readers, " workers read batches of their own");
  }

  ModelImpl& impl_;
  const Dataset data_;
  const FitOptions& options_;
  std::optional<DistributedIterator> iterator_;
  Read read_;                                    // this step's batches
  std::optional<Read> ahead_;                    // the next step's batches, where devices run programs
  std::vector<PerReplica<StepResult>> results_;  // [batch], once they were trained
  std::vector<std::vector<double>> earlier_;     // the sums of all but the last batch
  std::int64_t regroups_ = 0;                    // the number of regroups when the batch was divided
  std::int64_t examples_before_ = 0;             // of the epoch's data, before iterator_ began
  bool stopped_ = false;
};

}  // namespace

std::unique_ptr<StepSource> local_steps(ModelImpl& impl, const Dataset& data, const FitOptions& options) {
  if (unwrap(impl.strategy)
          .workers()
          .is_elastic()) {  // the steps have the same batches, however many workers there are
    const auto policy = data.options().auto_shard_policy;
    if (policy != AutoShardPolicy::automatic && policy != AutoShardPolicy::data) {
      throw collective::RefusedByAll(  // all workers have the same policy
          impl.topology.peers,
          "fit: an elastic strategy needs a data set that all workers read: its auto_shard_policy must be "
          "AutoShardPolicy::automatic or data");
    }
    return std::make_unique<LocalSteps>(impl, data.with_options({.auto_shard_policy = AutoShardPolicy::data}), options);
  }
  return std::make_unique<LocalSteps>(impl, data, options);
}

}  // namespace lockstep::train
