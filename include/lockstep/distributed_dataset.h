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

class StrategyImpl;

// Belongs to one thread at a time.
class DistributedIterator {
 public:
  enum class Kind { split, one_each };  // how an element of the data set reaches the replicas

  DistributedIterator(DatasetIterator input, Kind kind, std::shared_ptr<StrategyImpl> strategy)
      : input_(std::move(input)), kind_(kind), strategy_(std::move(strategy)) {}

  // Each replica's part of the next global batch, without examples (size 0) where there are too few; or nothing at the
  // end. Not within a step: replicas gather their parts in their own threads.
  std::optional<PerReplica<Example>> next();

  Position position() const { return input_.position(); }

 private:
  std::vector<Row> one_each(Row first);

  DatasetIterator input_;
  Kind kind_;
  std::shared_ptr<StrategyImpl> strategy_;
};

// What Strategy::distribute returns. Copies share a count of epochs: each `for (auto& batch : distributed)` walks the
// next one, which shuffles anew. Belongs to one thread at a time.
class DistributedDataset {
 public:
  DistributedDataset(Dataset dataset, DistributedIterator::Kind kind, std::shared_ptr<StrategyImpl> strategy)
      : dataset_(std::move(dataset)), kind_(kind), strategy_(std::move(strategy)) {}

  // From a position of your own, as a restart does.
  DistributedIterator iterate(Position position = {}) const { return {dataset_.iterate(position), kind_, strategy_}; }

  // Global batches an epoch, or Dataset::kInfinite or kUnknown.
  std::int64_t cardinality() const;

  class Range;
  Range begin() const;
  std::default_sentinel_t end() const { return {}; }

 private:
  Dataset dataset_;
  DistributedIterator::Kind kind_;
  std::shared_ptr<StrategyImpl> strategy_;
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
