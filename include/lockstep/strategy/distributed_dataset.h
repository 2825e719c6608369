// A data set whose elements come in one part a replica.
#pragma once

#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/data/dataset.h"
#include "lockstep/strategy/replica_values.h"

namespace lockstep {

namespace internal {
struct Part;

// This process's replicas, and between whom the data are divided.
struct LocalReplicas {
  std::vector<c10::Device> devices;  // one a replica
  Communicator workers = {};         // who share the data; each has as many replicas
  Communicator peers = {};           // who make the same steps: the workers, or processes with data of their own

  int count() const { return static_cast<int>(devices.size()); }
};
}  // namespace internal

// How elements of the data set reach the replicas.
enum class Distribution {
  split,         // all workers read the same elements: each is a global batch, of which a replica takes its part
  one_a_worker,  // all workers read the same elements: in each step a worker takes one, and its replicas their parts
  sharded,       // each worker reads its own: each lasts as many steps as there are workers
  one_each,      // each replica takes one
};

// Belongs to one thread at a time. Where workers read elements of their own, `next` is collective: a worker that has no
// more goes on without examples (size 0) until all have none.
class DistributedIterator {
 public:
  DistributedIterator(Dataset dataset, Distribution kind, internal::LocalReplicas replicas, Position position);
  DistributedIterator(Dataset dataset, Distribution kind, internal::LocalReplicas replicas, FromExample from);

  // The part of the next global batch of each replica of this process, without examples where there are too few; or
  // nothing at the end.
  std::optional<PerReplica<Example>> next();

  // The last step once more, for the workers as they are now: with one_a_worker, what is not used then comes in the
  // next step. For elements that all workers read.
  PerReplica<Example> again();

  // Do as `next` and `again`, for replicas to read their parts in their own threads.
  std::optional<PerReplica<internal::Part>> next_parts();
  PerReplica<internal::Part> parts_again();

  // Returns the parts of part `part` of `parts`, however many workers there are; each worker reads all elements. `skip`
  // reads the next element without parts: false at the end.
  std::optional<PerReplica<internal::Part>> next_parts_of(int part, int parts);
  bool skip();

  // Each replica's part of part `part` of `parts` of the element that was read last. Nothing where none was read since
  // the iterator was made.
  std::optional<PerReplica<internal::Part>> parts_of_last(int part, int parts) const;

  // Its index counts the steps that `next` has returned; with one_a_worker the elements in them.
  Position position() const { return position_; }

  // Examples in the elements that this worker has read since the iterator began, except an element of which a part is
  // still to be returned.
  std::int64_t examples() const { return examples_; }

  // The number of examples of the element that was read last; 0 before the first.
  std::int64_t element_size() const;

  // A hash of the element that was read last, or of the step's elements; 0 before the first. Where the rows still lie
  // in a table, only their indices and the first row are hashed, which is cheap.
  std::uint64_t element_hash() const;

  // True where each worker reads elements of its own.
  bool is_sharded() const { return kind_ == Distribution::sharded; }

 private:
  std::optional<PerReplica<internal::Part>> own_parts();
  std::optional<PerReplica<internal::Part>> one_a_worker();
  std::optional<PerReplica<internal::Part>> share_of_element();
  std::optional<PerReplica<internal::Part>> one_each();
  bool read();  // the next element; false at the end
  internal::Row without_examples() const;
  PerReplica<internal::Part> parts_without_examples() const;

  Dataset dataset_;
  Distribution kind_;
  internal::LocalReplicas replicas_;
  Position position_;
  DatasetIterator input_;
  std::shared_ptr<internal::Row> current_;            // the element that was read last
  std::vector<std::shared_ptr<internal::Row>> step_;  // one_a_worker: those of the last step
  std::deque<std::shared_ptr<internal::Row>> again_;  // one_a_worker: those to be read once more
  std::int64_t examples_ = 0;
  bool ended_ = false;
};

// The data set that Strategy::distribute returns. Copies share a count of epochs: each `for (auto& batch :
// distributed)` walks the next one, which shuffles anew. Belongs to one thread at a time.
class DistributedDataset {
 public:
  DistributedDataset(Dataset dataset, Distribution kind, internal::LocalReplicas replicas)
      : dataset_(std::move(dataset)), kind_(kind), replicas_(std::move(replicas)) {}

  // From a position of your own, as a restart does.
  DistributedIterator iterate(Position position = {}) const { return {dataset_, kind_, replicas_, position}; }
  DistributedIterator iterate_from(FromExample from) const { return {dataset_, kind_, replicas_, from}; }

  // True where each worker reads elements of its own.
  bool is_sharded() const { return kind_ == Distribution::sharded; }

  // Steps an epoch, or Dataset::kInfinite or kUnknown.
  std::int64_t cardinality() const;

  class Range;
  Range begin() const;
  std::default_sentinel_t end() const { return {}; }

 private:
  Dataset dataset_;
  Distribution kind_;
  internal::LocalReplicas replicas_;
  std::shared_ptr<std::int64_t> next_epoch_ = std::make_shared<std::int64_t>(0);
};

// An input iterator, for range-for.
class DistributedDataset::Range {
 public:
  explicit Range(DistributedIterator iterator) : iterator_(std::move(iterator)), batch_(iterator_.next()) {}
  PerReplica<Example>& operator*() { return *batch_; }
  Range& operator++() {
    batch_ = iterator_.next();
    return *this;
  }
  bool operator==(std::default_sentinel_t) const { return !batch_.has_value(); }

 private:
  DistributedIterator iterator_;
  std::optional<PerReplica<Example>> batch_;
};

inline DistributedDataset::Range DistributedDataset::begin() const {
  return Range(iterate({.epoch = (*next_epoch_)++}));
}

}  // namespace lockstep
