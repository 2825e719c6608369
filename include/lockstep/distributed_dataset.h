// A data set whose elements come in one part a replica.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/replica_values.h"

namespace lockstep {

namespace internal {
struct Part;

// This process's replicas, among those of all workers.
struct LocalReplicas {
  std::vector<c10::Device> devices;  // one a replica
  int first = 0;                     // its number among all
  int all = 0;
};
}  // namespace internal

// Belongs to one thread at a time.
class DistributedIterator {
 public:
  enum class Kind { split, one_each };  // how an element of the data set reaches the replicas

  DistributedIterator(DatasetIterator input, Kind kind, internal::LocalReplicas replicas)
      : input_(std::move(input)), kind_(kind), replicas_(std::move(replicas)) {}

  // The part of the next global batch of each replica of this process, without examples (size 0) where there are too
  // few; or nothing at the end.
  std::optional<PerReplica<Example>> next();

  // The same, for replicas to read their parts in their own threads.
  std::optional<PerReplica<internal::Part>> next_parts();

  Position position() const { return input_.position(); }

 private:
  DatasetIterator input_;
  Kind kind_;
  internal::LocalReplicas replicas_;
};

// What Strategy::distribute returns. Copies share a count of epochs: each `for (auto& batch : distributed)` walks the
// next one, which shuffles anew. Belongs to one thread at a time.
class DistributedDataset {
 public:
  DistributedDataset(Dataset dataset, DistributedIterator::Kind kind, internal::LocalReplicas replicas)
      : dataset_(std::move(dataset)), kind_(kind), replicas_(std::move(replicas)) {}

  // From a position of your own, as a restart does.
  DistributedIterator iterate(Position position = {}) const { return {dataset_.iterate(position), kind_, replicas_}; }

  // Global batches an epoch, or Dataset::kInfinite or kUnknown.
  std::int64_t cardinality() const;

  class Range;
  Range begin() const;
  std::default_sentinel_t end() const { return {}; }

 private:
  Dataset dataset_;
  DistributedIterator::Kind kind_;
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
