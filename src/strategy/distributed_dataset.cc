#include "lockstep/strategy/distributed_dataset.h"

#include <algorithm>

#include "base/hash.h"
#include "base/text.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"
#include "strategy/split.h"

namespace lockstep {
using internal::LocalReplicas;
using internal::Part;
using internal::Row;

namespace {

constexpr std::int64_t kBatchesAhead = 2;

// Divides part `part` of `parts` of a global batch among the devices.
PerReplica<Part> split(const Row& batch, const std::vector<c10::Device>& devices, int part, int parts) {
  const auto divide = [&](std::int64_t size, const auto& row_for) {
    const auto count = static_cast<std::int64_t>(devices.size());
    const std::int64_t all = count * parts, each = size / all, larger = size % all;
    std::vector<Part> made;
    for (std::int64_t replica = count * part; const auto device : devices) {
      const auto begin = each * replica + std::min(replica, larger);
      made.push_back({row_for(begin, each + (replica < larger ? 1 : 0)), device});
      ++replica;
    }
    return PerReplica<Part>(std::move(made));
  };
  if (batch.batch) {
    return divide(static_cast<std::int64_t>(batch.batch->size()), [&](std::int64_t begin, std::int64_t count) {
      const auto first = batch.batch->begin() + begin;
      return Row{.table = batch.table, .batch = std::vector(first, first + count)};
    });
  }
  const auto whole = batch.materialize();
  strategy::check_batch(whole);
  return divide(whole.size(), [&](std::int64_t begin, std::int64_t count) {
    return Row{.value = internal::rows_of(whole, begin, count)};
  });
}

// Divides a global batch among all workers' replicas: returns those of this process.
PerReplica<Part> split(const Row& batch, const LocalReplicas& replicas) {
  return split(batch, replicas.devices, replicas.workers.rank(), replicas.workers.size());
}

PerReplica<Example> read_all(const PerReplica<Part>& parts) {
  std::vector<Example> examples;
  for (const auto& part : parts) examples.push_back(part.read());
  return PerReplica<Example>(std::move(examples));
}

std::uint64_t hash_of(const Row& element) {
  const auto of_example = [](const auto& row) {
    std::uint64_t hash = 0;
    for (const auto& tensor : {row.x, row.y, row.weight})
      hash = mix(hash, tensor.defined() ? gradient::hash_of(tensor) : 0);
    return hash;
  };
  if (!element.batch) return of_example(element.materialize());
  std::uint64_t hash = 0;
  for (const auto index : *element.batch) hash = mix(hash, static_cast<std::uint64_t>(index));
  if (element.batch->empty()) return hash;
  const auto first = [&](const Tensor& column) { return column[element.batch->front()]; };
  return mix(hash, of_example(internal::each_of(*element.table, first)));
}

// Returns the number of elements in `steps` steps of a position.
std::int64_t elements_in(std::int64_t steps, Distribution kind, const LocalReplicas& replicas) {
  switch (kind) {
    case Distribution::split:
    case Distribution::one_a_worker: return steps;
    case Distribution::sharded: return steps / replicas.workers.size();
    case Distribution::one_each: return steps * replicas.count();
  }
  return 0;
}

}  // namespace

Example Part::moved(const Example& example) const {
  const bool there = device.is_cpu() && (!example.x.defined() || example.x.device().is_cpu());
  if (there) return example;
  return internal::each_of(example, [&](const Tensor& tensor) { return tensor.to(device); });
}

PerReplica<Part> strategy::split_batch(const Example& batch, const LocalReplicas& replicas) {
  return split({.value = batch}, replicas);
}

void strategy::check_batch(const Example& batch) {
  if (!batch.x.defined()) throw InvalidArgument("an element of the data set has no x");
  const auto shape_of = [](const Tensor& tensor) {
    return tensor.defined() ? text(tensor.sizes()) : std::string("none");
  };
  const auto fits = [&](const Tensor& tensor) {
    return !tensor.defined() || (tensor.dim() > 0 && tensor.size(0) == batch.size());
  };
  if (batch.x.dim() > 0 && fits(batch.y) && fits(batch.weight)) return;
  throw InvalidArgument(text("the data set's elements are no batches (x has shape ", shape_of(batch.x), ", y ",
                             shape_of(batch.y), ", weight ", shape_of(batch.weight), "); call batch() on it first"));
}

DistributedIterator::DistributedIterator(Dataset dataset, Distribution kind, LocalReplicas replicas, Position position)
    : dataset_(std::move(dataset)),
      kind_(kind),
      replicas_(std::move(replicas)),
      position_(position),
      input_(dataset_.iterate({position.epoch, elements_in(position.index, kind_, replicas_)})) {
  if (kind_ == Distribution::sharded && position.index % replicas_.workers.size() != 0) read();
}

DistributedIterator::DistributedIterator(Dataset dataset, Distribution kind, LocalReplicas replicas, FromExample from)
    : dataset_(std::move(dataset)),
      kind_(kind),
      replicas_(std::move(replicas)),
      position_{.epoch = from.epoch},
      input_(dataset_.iterate_from(from)) {}

std::optional<PerReplica<Part>> DistributedIterator::next_parts() {
  auto parts = own_parts();
  const bool reads_the_same = kind_ == Distribution::split || kind_ == Distribution::one_a_worker;
  if (!reads_the_same && replicas_.peers.size() > 1) {
    if (!replicas_.peers.any(parts.has_value())) return std::nullopt;
    if (!parts) parts.emplace(parts_without_examples());
  }
  if (parts) position_.index += kind_ == Distribution::one_a_worker ? static_cast<std::int64_t>(step_.size()) : 1;
  return parts;
}

PerReplica<Part> DistributedIterator::parts_again() {
  if (kind_ != Distribution::one_a_worker) return split(*current_, replicas_);
  for (const auto& element : step_) examples_ -= element->examples();
  position_.index -= static_cast<std::int64_t>(step_.size());
  again_.insert(again_.begin(), step_.begin(), step_.end());
  return next_parts().value();
}

std::optional<PerReplica<Part>> DistributedIterator::next_parts_of(int part, int parts) {
  if (!skip()) return std::nullopt;
  return split(*current_, replicas_.devices, part, parts);
}

std::optional<PerReplica<Part>> DistributedIterator::parts_of_last(int part, int parts) const {
  if (!current_) return std::nullopt;
  return split(*current_, replicas_.devices, part, parts);
}

bool DistributedIterator::skip() {
  if (!read()) return false;
  ++position_.index;
  return true;
}

std::optional<PerReplica<Part>> DistributedIterator::own_parts() {
  switch (kind_) {
    case Distribution::split:
      if (!read()) return std::nullopt;
      examples_ += current_->examples();
      return split(*current_, replicas_);
    case Distribution::one_a_worker: return one_a_worker();
    case Distribution::sharded: return share_of_element();
    case Distribution::one_each: return one_each();
  }
  return std::nullopt;
}

std::optional<PerReplica<Part>> DistributedIterator::one_a_worker() {
  const auto workers = static_cast<std::size_t>(replicas_.workers.size());
  const auto rank = static_cast<std::size_t>(replicas_.workers.rank());
  step_.clear();
  while (step_.size() < workers && read()) step_.push_back(current_);
  if (step_.empty()) return std::nullopt;
  for (const auto& element : step_) examples_ += element->examples();
  return rank < step_.size() ? split(*step_[rank], replicas_.devices, 0, 1) : parts_without_examples();
}

// Returns a part of a global batch, of which this worker uses all parts itself, one in each step.
std::optional<PerReplica<Part>> DistributedIterator::share_of_element() {
  const auto turn = static_cast<int>(position_.index % replicas_.workers.size());
  if (turn == 0 && !read()) return std::nullopt;
  if (ended_) return std::nullopt;
  if (turn == replicas_.workers.size() - 1) examples_ += current_->examples();
  return split(*current_, replicas_.devices, turn, replicas_.workers.size());
}

std::optional<PerReplica<Part>> DistributedIterator::one_each() {
  std::vector<Part> parts;
  for (const auto device : replicas_.devices) {
    if (read()) {
      parts.push_back({*current_, device});
    } else if (parts.empty()) {
      return std::nullopt;
    } else {
      parts.push_back({without_examples(), device});
    }
  }
  return PerReplica<Part>(std::move(parts));
}

bool DistributedIterator::read() {
  if (!again_.empty()) {
    current_ = std::move(again_.front());
    again_.pop_front();
    return true;
  }
  Row row;
  ended_ = ended_ || !input_.next(row);
  if (!ended_) current_ = std::make_shared<Row>(std::move(row));
  return !ended_;
}

std::int64_t DistributedIterator::element_size() const {
  const auto& element = step_.empty() ? current_ : step_.front();
  return element ? element->examples() : 0;
}

std::uint64_t DistributedIterator::element_hash() const {
  if (step_.empty()) return current_ ? hash_of(*current_) : 0;
  std::uint64_t hash = 0;
  for (const auto& element : step_) hash = mix(hash, hash_of(*element));
  return hash;
}

PerReplica<Part> DistributedIterator::parts_without_examples() const {
  std::vector<Part> none;
  for (const auto device : replicas_.devices) none.push_back({without_examples(), device});
  return PerReplica<Part>(std::move(none));
}

// Returns an element of the same shape and dtypes with no examples.
Row DistributedIterator::without_examples() const {
  const auto any = current_ ? std::optional(current_->materialize()) : dataset_.iterate({position_.epoch}).next();
  if (!any) throw InvalidArgument("a worker's part of the data set is empty; AutoShardPolicy::data gives each some");
  strategy::check_batch(*any);
  return {.value = internal::rows_of(*any, 0, 0)};
}

std::optional<PerReplica<Example>> DistributedIterator::next() {
  const auto parts = next_parts();
  return parts ? std::optional(read_all(*parts)) : std::nullopt;
}

PerReplica<Example> DistributedIterator::again() { return read_all(parts_again()); }

std::int64_t DistributedDataset::cardinality() const {
  const auto batches = dataset_.cardinality();
  const auto replicas = static_cast<std::int64_t>(replicas_.count());
  if (kind_ == Distribution::split || batches < 0) return batches;
  if (kind_ == Distribution::sharded) return batches * replicas_.workers.size();
  const auto of_a_step = kind_ == Distribution::one_a_worker ? replicas_.workers.size() : replicas;
  return (batches + of_a_step - 1) / of_a_step;
}

namespace {

// Returns the data set that this worker reads, and how its elements are divided.
std::pair<Dataset, Distribution> part_of_worker(const Dataset& data, const LocalReplicas& replicas) {
  const auto& workers = replicas.workers;
  auto policy = data.options().auto_shard_policy;
  if (policy == AutoShardPolicy::automatic) {
    policy = data.num_files() < workers.size() ? AutoShardPolicy::data : AutoShardPolicy::file;
  }
  if (workers.size() == 1) return {data, replicas.peers.size() > 1 ? Distribution::sharded : Distribution::split};
  if (policy == AutoShardPolicy::data) return {data, Distribution::split};
  const bool by_file = policy == AutoShardPolicy::file;
  return {by_file ? data.shard_files(workers.size(), workers.rank()) : data, Distribution::sharded};
}

}  // namespace

DistributedDataset strategy::distribute(const Dataset& data, const LocalReplicas& replicas) {
  const auto [mine, kind] = part_of_worker(data, replicas);
  return {mine, kind, replicas};
}

bool strategy::reads_its_own(const Dataset& data, const LocalReplicas& replicas) {
  return part_of_worker(data, replicas).second == Distribution::sharded;
}

Example strategy::first_element(const Dataset& data, const LocalReplicas& replicas, std::int64_t epoch) {
  auto first = part_of_worker(data, replicas).first.first(epoch);
  if (!first) first = data.first(epoch);  // this worker's part may be empty
  return first.value_or(Example());
}

DistributedDataset strategy::distribute_ahead(const Dataset& data, const LocalReplicas& replicas,
                                              std::optional<Distribution> given) {
  const bool on_cpus =
      std::all_of(replicas.devices.begin(), replicas.devices.end(), [](auto device) { return device.is_cpu(); });
  const auto [mine, kind] = given ? std::pair(data, *given) : part_of_worker(data, replicas);
  const bool left = on_cpus && mine.lies_in_memory();
  return {left ? mine : mine.prefetch(kBatchesAhead), kind, replicas};
}

}  // namespace lockstep
