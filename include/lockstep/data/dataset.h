// Dataset: a pipeline of stages that yields examples, or batches of them. Follows tf.data.Dataset.
//
// A Dataset is a shared handle to an immutable description; each stage makes a new one. Any thread may hold one. An
// iterator belongs to one thread at a time. Every example comes once an epoch; the order depends on seeds and the epoch
// alone, never on timing, so a position is two numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/ops/tensor.h"

namespace lockstep {

// One example, or a batch with one more leading dimension. A tensor that a data set does not have is undefined.
struct Example {
  Tensor x = Tensor();
  Tensor y = Tensor();
  Tensor weight = Tensor();  // sample weights: a number an example

  // Examples in a batch: the leading size of x.
  std::int64_t size() const { return x.defined() && x.dim() > 0 ? x.size(0) : 0; }
};

// Where an iterator stands: it has yielded `index` elements of epoch `epoch`.
struct Position {
  std::int64_t epoch = 0;
  std::int64_t index = 0;
};

// A place in a data set of batches that does not depend on their size: after the first `example` examples of the epoch.
struct FromExample {
  std::int64_t epoch = 0;
  std::int64_t example = 0;
};

struct MapOptions {
  int num_parallel_calls = 1;  // threads that call the function; results keep their order
};

struct ShuffleOptions {
  std::optional<std::uint64_t> seed = {};  // else the next of the program's seeds
  bool reshuffle_each_iteration = true;
};

// How examples are divided among workers that train together. Batches are global with all policies. Follows
// tf.data.experimental.AutoShardPolicy.
enum class AutoShardPolicy : std::uint8_t {
  automatic,  // file where the data set is of as many files as there are workers or more, else data
  file,  // those of every num_workers-th file: each example once an epoch, in other batches than one process makes;
         // InvalidArgument where a worker's files make no batch at all
  data,  // its part of each batch: each example once, in the batches that one process makes
  off,   // all of them: each example once a worker
};

struct DatasetOptions {
  AutoShardPolicy auto_shard_policy = AutoShardPolicy::automatic;
};

struct BatchOptions {
  bool drop_remainder = false;
};

namespace internal {
class Cursor;
struct Row;
struct Stage;
}  // namespace internal

class DatasetIterator {
 public:
  explicit DatasetIterator(std::shared_ptr<const internal::Stage> stage, Position position);
  DatasetIterator(std::shared_ptr<const internal::Stage> stage, FromExample from);
  ~DatasetIterator();
  DatasetIterator(DatasetIterator&&) noexcept;
  DatasetIterator& operator=(DatasetIterator&&) noexcept;

  // The next element, or nothing at the end of the epoch. Throws what the stages throw (DataError, the user's own).
  std::optional<Example> next();
  Position position() const { return position_; }

 private:
  friend class DistributedIterator;
  bool next(internal::Row& row);  // the same, but what lies in memory is not copied yet

  std::shared_ptr<const internal::Stage> stage_;
  std::unique_ptr<internal::Cursor> cursor_;
  Position position_;
};

class Dataset {
 public:
  static constexpr std::int64_t kInfinite = -1;
  static constexpr std::int64_t kUnknown = -2;
  using Generator = std::function<std::optional<Example>()>;

  // Slices along the first dimension. Throws InvalidArgument when the first sizes differ.
  static Dataset from_tensor_slices(Tensor x, Tensor y = {}, Tensor weight = {});

  // Calls `make` once an epoch; the function that it returns yields examples until it returns nothing.
  static Dataset from_generator(std::function<Generator()> make, std::int64_t cardinality = kUnknown);

  // IDX files, gzip or not: images as uint8 [1, height, width] (other ranks as they are), labels as int64 scalars.
  // Throws IoError, and DataError naming the file and offset.
  static Dataset from_idx(const std::string& images, const std::string& labels);

  // The elements of read(path) for each path, one file after the other. `read` may be called again in every epoch, by
  // any thread. Follows list_files().interleave() with a cycle_length of 1.
  static Dataset from_files(std::vector<std::string> paths, std::function<Dataset(const std::string& path)> read);

  // Passes each element through `function`, in order. The function owns its argument and may change it in place. With
  // several calls at once the function must be thread safe.
  Dataset map(std::function<Example(Example)> function, MapOptions options = {}) const;

  // Keeps the elements of the first whole epoch in memory, or in `file` (made if missing, read if there), as one tensor
  // each for x, y and weight. Elements must have one shape.
  Dataset cache(const std::string& file = "") const;

  // Draws from a buffer of `buffer_size` elements; one as large as the data set shuffles it uniformly.
  Dataset shuffle(std::int64_t buffer_size, ShuffleOptions options = {}) const;

  // Stacks `size` elements; the last batch may be smaller.
  Dataset batch(std::int64_t size, BatchOptions options = {}) const;

  Dataset repeat(std::int64_t count = kInfinite) const;
  Dataset take(std::int64_t count) const;
  Dataset skip(std::int64_t count) const;

  // Every `num_shards`-th element, from `index` on.
  Dataset shard(std::int64_t num_shards, std::int64_t index) const;

  // Makes up to `buffer_size` elements ahead, in a thread of its own.
  Dataset prefetch(std::int64_t buffer_size) const;

  // Sets the options, which the stages that follow keep.
  Dataset with_options(DatasetOptions options) const;
  const DatasetOptions& options() const { return options_; }

  // For from_files: the number of files, and the data set of every `num_shards`-th file, from `index` on. Throws
  // InvalidArgument where there are fewer files than `num_shards`. After take(), skip() and shard(), which count
  // elements of all files, there are no files.
  std::int64_t num_files() const;
  Dataset shard_files(std::int64_t num_shards, std::int64_t index) const;

  // True where the next epoch's elements are copies out of tensors and nothing else is computed. A cache() that has
  // been filled makes them so, until the next map().
  bool lies_in_memory() const;

  // Elements an epoch, or kInfinite, or kUnknown.
  std::int64_t cardinality() const;

  DatasetIterator iterate(Position position = {}) const;

  // The first element of an epoch; nothing where the epoch is empty. In the data set that keeping_first returns, the
  // next iterator over this epoch begins with the element that `first` read. So nothing is computed twice, and a source
  // that can be read once loses nothing. Throws what the source and the functions of map throw. Any thread; copies of
  // that data set share the element.
  std::optional<Example> first(std::int64_t epoch = 0) const;
  Dataset keeping_first() const;

  // The batches that begin after the example; the iterator's position counts from there. Throws InvalidArgument where
  // batches are not made by batch() and none begins there.
  DatasetIterator iterate_from(FromExample from) const;

 private:
  explicit Dataset(std::shared_ptr<const internal::Stage> stage, DatasetOptions options = {})
      : stage_(std::move(stage)), options_(options) {}
  std::shared_ptr<const internal::Stage> stage_;
  DatasetOptions options_;
};

namespace datasets {

struct TrainTest {
  Dataset train;
  Dataset test;
};

// The four IDX files of MNIST, under their usual names (`train-images-idx3-ubyte`, ..., each also with .gz), in
// `directory`.
TrainTest mnist(const std::string& directory);

// Fashion-MNIST as Debian's package dataset-fashion-mnist installs it.
TrainTest fashion_mnist();

}  // namespace datasets

}  // namespace lockstep
