// map: calls a function on each element, in this thread or on several, and keeps the order.
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "base/hash.h"
#include "base/text.h"
#include "data/stage.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "ops/replica_random.h"

namespace lockstep::data {
namespace {

// An example that the function may change in place: a row of a table is copied.
Example own(const Row& row) {
  const bool shared = row.table != nullptr && !row.batch;
  if (!shared) return row.materialize();
  return internal::each_of(row.materialize(), [](const Tensor& tensor) { return tensor.clone(); });
}

using Function = std::function<Example(Example)>;

// Calls a function with random numbers that depend only on the element's position over all epochs.
class SeededCall {
 public:
  SeededCall(Function function, std::uint64_t seed) : function_(std::move(function)), seed_(seed) {}

  Example operator()(Example example, std::int64_t index) {
    random_.seed(mix(seed_, static_cast<std::uint64_t>(index)));
    const ops::ReplicaRandom::Use use(random_);
    try {
      return function_(std::move(example));
    } catch (const c10::Error& error) {
      throw DataError(text("the function of map failed on element ", index, ": ", error.what_without_backtrace()));
    }
  }

 private:
  Function function_;
  std::uint64_t seed_;
  ops::ReplicaRandom random_;
};

// True where the function keeps the size of a batch: then equally many examples have passed before and after it.
using KeepsSizes = std::function<bool()>;

class MapCursor final : public Cursor {
 public:
  MapCursor(std::unique_ptr<Cursor> input, Function function, std::uint64_t seed, KeepsSizes keeps_sizes)
      : input_(std::move(input)), call_(std::move(function), seed), keeps_sizes_(std::move(keeps_sizes)) {}

  bool next(Row& row) override {
    if (!input_->next(row)) return false;
    row = {call_(own(row), index_++)};
    return true;
  }
  void skip(std::int64_t count) override {
    input_->skip(count);
    index_ += count;
  }
  bool skip_examples(std::int64_t count) override {
    if (!keeps_sizes_()) return Cursor::skip_examples(count);
    index_ += count;  // other batches than before, so they may have other random numbers
    return input_->skip_examples(count);
  }

 private:
  std::unique_ptr<Cursor> input_;
  SeededCall call_;
  KeepsSizes keeps_sizes_;
  std::int64_t index_ = 0;
};

// Reads ahead by a few elements a thread; an exception of a call is thrown at its element's position.
class ParallelMapCursor final : public Cursor {
 public:
  ParallelMapCursor(std::unique_ptr<Cursor> input, const Function& function, int calls, std::uint64_t seed,
                    KeepsSizes keeps_sizes)
      : input_(std::move(input)), keeps_sizes_(std::move(keeps_sizes)), ahead_(static_cast<std::size_t>(calls) * 4) {
    for (int i = 0; i < calls; ++i) {
      threads_.emplace_back(
          [this, function, seed](const std::stop_token& stop) { work(SeededCall(function, seed), stop); });
    }
  }

  bool next(Row& row) override {
    while (!ended_ && results_.size() < ahead_) submit();
    if (results_.empty()) return false;
    auto result = std::move(results_.front());
    results_.pop_front();
    row = {result.get()};
    return true;
  }
  void skip(std::int64_t count) override {
    for (; count > 0 && !results_.empty(); --count) results_.pop_front();
    input_->skip(count);
    index_ += count;
  }
  bool skip_examples(std::int64_t count) override {
    if (index_ > 0 || !keeps_sizes_()) return Cursor::skip_examples(count);
    index_ = count;
    return input_->skip_examples(count);
  }

 private:
  using Task = std::packaged_task<Example(SeededCall& call)>;

  void submit() {
    Row row;
    if (!input_->next(row)) {
      ended_ = true;
      return;
    }
    // The result keeps this function until it is read, and must not keep the input.
    Task task([row = std::move(row), index = index_++](SeededCall& call) mutable {
      const Row input = std::exchange(row, {});
      return call(own(input), index);
    });
    results_.push_back(task.get_future());
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    arrived_.notify_one();
  }

  void work(SeededCall call, const std::stop_token& stop) {
    for (;;) {
      std::unique_lock lock(mutex_);
      if (!arrived_.wait(lock, stop, [this] { return !tasks_.empty(); })) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task(call);
    }
  }

  std::unique_ptr<Cursor> input_;
  KeepsSizes keeps_sizes_;
  std::size_t ahead_;
  std::int64_t index_ = 0;
  bool ended_ = false;
  std::deque<std::future<Example>> results_;

  std::mutex mutex_;
  std::condition_variable_any arrived_;
  std::deque<Task> tasks_;             // guarded by mutex_
  std::vector<std::jthread> threads_;  // last: they end before what they use
};

}  // namespace

StagePtr make_map_stage(StagePtr input, std::function<Example(Example)> function, MapOptions options) {
  const auto seed_of_all = next_random_seed();
  return over(std::move(input),
              [function, calls = options.num_parallel_calls, seed_of_all](Stage& stage, const StagePtr& from) {
                stage.open = [from, function, calls, seed_of_all](std::int64_t epoch) -> std::unique_ptr<Cursor> {
                  const auto seed = mix(seed_of_all, static_cast<std::uint64_t>(epoch));
                  const auto keeps_sizes = [from, function, epoch, seed] {
                    Row first;
                    if (!from->open(epoch)->next(first)) return true;
                    const auto before = first.examples();
                    return SeededCall(function, seed)(own(first), 0).size() == before;
                  };
                  if (calls == 1) return std::make_unique<MapCursor>(from->open(epoch), function, seed, keeps_sizes);
                  return std::make_unique<ParallelMapCursor>(from->open(epoch), function, calls, seed, keeps_sizes);
                };
                stage.lies_in_memory = [] { return false; };
              });
}

}  // namespace lockstep::data
