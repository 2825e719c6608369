#include "lockstep/data/dataset.h"

#include <map>
#include <mutex>
#include <utility>

#include "base/text.h"
#include "data/stage.h"
#include "data/tables.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr int kMostParallelCalls = 1024;

}  // namespace

Example internal::Row::materialize() const {
  if (table == nullptr) return value;
  if (batch) return data::gather_rows(*table, *batch);
  return each_of(*table, [this](const Tensor& column) { return column.select(0, index); });
}

DatasetIterator::DatasetIterator(std::shared_ptr<const internal::Stage> stage, Position position)
    : stage_(std::move(stage)), cursor_(stage_->open(position.epoch)), position_(position) {
  cursor_->skip(position.index);
}

DatasetIterator::DatasetIterator(std::shared_ptr<const internal::Stage> stage, FromExample from)
    : stage_(std::move(stage)), cursor_(stage_->open(from.epoch)), position_{.epoch = from.epoch} {
  if (cursor_->skip_examples(from.example)) return;
  throw InvalidArgument(text("no batch of this data set begins after its first ", from.example,
                             " examples, where the epoch is to go on; call batch() after take, shard, shuffle and "
                             "cache, or make batches of the size that they had"));
}

DatasetIterator::~DatasetIterator() = default;
DatasetIterator::DatasetIterator(DatasetIterator&&) noexcept = default;
DatasetIterator& DatasetIterator::operator=(DatasetIterator&&) noexcept = default;

bool DatasetIterator::next(internal::Row& row) {
  if (!cursor_->next(row)) return false;
  ++position_.index;
  return true;
}

std::optional<Example> DatasetIterator::next() {
  internal::Row row;
  return next(row) ? std::optional(row.materialize()) : std::nullopt;
}

Dataset Dataset::from_tensor_slices(Tensor x, Tensor y, Tensor weight) {
  if (!x.defined() || x.dim() == 0)
    throw InvalidArgument("from_tensor_slices: x must be a tensor with at least one dimension");
  for (const auto& [name, tensor] : {std::pair("y", y), std::pair("weight", weight)}) {
    if (tensor.defined() && (tensor.dim() == 0 || tensor.size(0) != x.size(0))) {
      throw InvalidArgument(
          text("from_tensor_slices: x has ", x.size(0), " examples, ", name, " has shape ", tensor.sizes()));
    }
  }
  return Dataset(data::make_table_stage({std::move(x), std::move(y), std::move(weight)}));
}

Dataset Dataset::from_generator(std::function<Generator()> make, std::int64_t cardinality) {
  if (!make) throw InvalidArgument("from_generator: the function that makes the generator is empty");
  return Dataset(data::make_generator_stage(std::move(make), cardinality));
}

Dataset Dataset::from_files(std::vector<std::string> paths, std::function<Dataset(const std::string&)> read) {
  if (paths.empty()) throw InvalidArgument("from_files: there are no paths");
  if (!read) throw InvalidArgument("from_files: the function that reads a file is empty");
  return Dataset(data::make_files_stage(std::move(paths), std::move(read)));
}

Dataset Dataset::from_idx(const std::string& images, const std::string& labels) {
  auto x = data::read_idx(images);
  auto y = data::read_idx(labels).to(at::kLong);
  if (x.dim() == 0 || y.dim() == 0 || x.size(0) != y.size(0)) {
    throw DataError(text(images, " has ", x.dim() == 0 ? 0 : x.size(0), " images, ", labels, " has ",
                         y.dim() == 0 ? 0 : y.size(0), " labels"));
  }
  if (x.dim() == 3) x = x.unsqueeze(1);
  return from_tensor_slices(x, y);
}

Dataset Dataset::map(std::function<Example(Example)> function, MapOptions options) const {
  if (!function) throw InvalidArgument("Dataset::map: the function is empty");
  require(options.num_parallel_calls >= 1 && options.num_parallel_calls <= kMostParallelCalls,
          "Dataset::map: num_parallel_calls", options.num_parallel_calls, "from 1 to 1024: each is a thread");
  return Dataset(data::make_map_stage(stage_, std::move(function), options), options_);
}

Dataset Dataset::cache(const std::string& file) const {
  return Dataset(data::make_cache_stage(stage_, file), options_);
}

Dataset Dataset::shuffle(std::int64_t buffer_size, ShuffleOptions options) const {
  require(buffer_size >= 1, "Dataset::shuffle: buffer_size", buffer_size, "at least 1");
  return Dataset(data::make_shuffle_stage(stage_, buffer_size, options), options_);
}

Dataset Dataset::batch(std::int64_t size, BatchOptions options) const {
  require(size >= 1, "Dataset::batch: size", size, "at least 1");
  return Dataset(data::make_batch_stage(stage_, size, options), options_);
}

Dataset Dataset::repeat(std::int64_t count) const {
  require(count >= 0 || count == kInfinite, "Dataset::repeat: count", count, "0 or more, or Dataset::kInfinite");
  return Dataset(data::make_repeat_stage(stage_, count), options_);
}

Dataset Dataset::take(std::int64_t count) const {
  require(count >= 0, "Dataset::take: count", count, "0 or more");
  return Dataset(data::make_take_stage(stage_, count), options_);
}

Dataset Dataset::skip(std::int64_t count) const {
  require(count >= 0, "Dataset::skip: count", count, "0 or more");
  return Dataset(data::make_skip_stage(stage_, count), options_);
}

Dataset Dataset::shard(std::int64_t num_shards, std::int64_t index) const {
  require(num_shards >= 1, "Dataset::shard: num_shards", num_shards, "at least 1");
  require(index >= 0 && index < num_shards, "Dataset::shard: index", index, "at least 0 and below num_shards");
  return Dataset(data::make_shard_stage(stage_, num_shards, index), options_);
}

Dataset Dataset::prefetch(std::int64_t buffer_size) const {
  require(buffer_size >= 1, "Dataset::prefetch: buffer_size", buffer_size, "at least 1");
  return Dataset(data::make_prefetch_stage(stage_, buffer_size), options_);
}

Dataset Dataset::with_options(DatasetOptions options) const { return Dataset(stage_, options); }

std::int64_t Dataset::num_files() const { return stage_->files; }

Dataset Dataset::shard_files(std::int64_t num_shards, std::int64_t index) const {
  require(num_shards >= 1, "Dataset::shard_files: num_shards", num_shards, "at least 1");
  require(index >= 0 && index < num_shards, "Dataset::shard_files: index", index, "at least 0 and below num_shards");
  if (num_files() < num_shards) {
    throw InvalidArgument(text("a data set of ", num_files(),
                               " files (Dataset::from_files) cannot be divided by files among ", num_shards,
                               "; divide it by AutoShardPolicy::data"));
  }
  return Dataset(stage_->over_files(num_shards, index), options_);
}

bool Dataset::lies_in_memory() const { return stage_->lies_in_memory(); }

std::int64_t Dataset::cardinality() const { return stage_->cardinality; }

DatasetIterator Dataset::iterate(Position position) const { return DatasetIterator(stage_, position); }

std::optional<Example> Dataset::first(std::int64_t epoch) const {
  internal::Row row;
  const bool found = stage_->keep_first ? stage_->keep_first(epoch, row) : stage_->open(epoch)->next(row);
  return found ? std::optional(row.materialize()) : std::nullopt;
}

Dataset Dataset::keeping_first() const { return Dataset(data::make_kept_first_stage(stage_), options_); }

DatasetIterator Dataset::iterate_from(FromExample from) const {
  require(from.example >= 0, "Dataset::iterate_from: example", from.example, "0 or more");
  return DatasetIterator(stage_, from);
}

}  // namespace lockstep

namespace lockstep::data {

StagePtr over(StagePtr input, std::function<void(Stage& stage, const StagePtr& input)> change) {
  auto stage = std::make_shared<Stage>(*input);
  stage->over_files = nullptr;
  stage->keep_first = nullptr;
  change(*stage, input);
  if (stage->files > 0 && !stage->over_files) {
    stage->over_files = [input, change](std::int64_t num_shards, std::int64_t index) {
      return over(input->over_files(num_shards, index), change);
    };
  }
  return stage;
}

decltype(Stage::over_files) made_once(decltype(Stage::over_files) make) {
  struct Parts {
    std::mutex mutex;
    std::map<std::pair<std::int64_t, std::int64_t>, StagePtr> made;  // guarded by mutex
  };
  return [make = std::move(make), parts = std::make_shared<Parts>()](std::int64_t num_shards, std::int64_t index) {
    const std::lock_guard lock(parts->mutex);
    auto& part = parts->made[{num_shards, index}];
    if (part == nullptr) part = make(num_shards, index);
    return part;
  };
}

}  // namespace lockstep::data
