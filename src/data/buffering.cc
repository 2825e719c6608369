// Stages that hold elements: batch, cache, prefetch.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <variant>

#include "base/text.h"
#include "checkpoint/files.h"
#include "data/stage.h"
#include "data/tables.h"

namespace lockstep::data {
namespace {

class BatchCursor final : public Cursor {
 public:
  BatchCursor(std::unique_ptr<Cursor> input, std::int64_t size, bool drop_remainder)
      : input_(std::move(input)), size_(static_cast<std::size_t>(size)), drop_remainder_(drop_remainder) {}

  bool next(Row& row) override {
    rows_.clear();
    for (Row next; rows_.size() < size_ && input_->next(next);) rows_.push_back(std::exchange(next, {}));
    if (rows_.empty() || (drop_remainder_ && rows_.size() < size_)) return false;
    row = batch_of(rows_);
    return true;
  }
  void skip(std::int64_t count) override { input_->skip(count * static_cast<std::int64_t>(size_)); }
  bool skip_examples(std::int64_t count) override {
    input_->skip(count);
    return true;
  }

 private:
  std::unique_ptr<Cursor> input_;
  std::size_t size_;
  bool drop_remainder_;
  std::vector<Row> rows_;
};

// The table of a cache, once some iterator has gone through the whole input.
class CacheState {
 public:
  explicit CacheState(std::string file) : file_(std::move(file)) {}

  StagePtr table() {
    const std::lock_guard lock(mutex_);
    if (table_ == nullptr && !file_.empty() && checkpoint::file_exists(table_file(file_))) {
      table_ = make_table_stage(read_table(file_));
    }
    return table_;
  }
  void keep(const Example& table) {
    const std::lock_guard lock(mutex_);
    if (table_ != nullptr) return;
    if (!file_.empty()) write_table(file_, table);
    table_ = make_table_stage(table);
  }

 private:
  const std::string file_;
  std::mutex mutex_;
  StagePtr table_;  // guarded by mutex_
};

// Passes the input's elements on, and keeps them when all have passed.
std::unique_ptr<Cursor> filling(std::unique_ptr<Cursor> input, std::int64_t cardinality,
                                std::shared_ptr<CacheState> state) {
  return cursor_of([input = std::move(input), builder = TableBuilder(cardinality > 0 ? cardinality : 1024),
                    state = std::move(state), ended = false](Row& row) mutable {
    if (ended) return false;
    if (input->next(row)) {
      row = {row.materialize()};
      builder.append(row.value);
      return true;
    }
    ended = true;
    if (builder.size() > 0) state->keep(builder.finish());
    return false;
  });
}

class PrefetchCursor final : public Cursor {
 public:
  PrefetchCursor(std::unique_ptr<Cursor> input, std::int64_t buffer_size)
      : input_(std::move(input)), buffer_size_(static_cast<std::size_t>(buffer_size)) {}

  bool next(Row& row) override {
    if (!thread_.joinable() && ready_.empty()) {
      thread_ = std::jthread([this](const std::stop_token& stop) { produce(stop); });
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !ready_.empty(); });
    if (const auto* error = std::get_if<std::exception_ptr>(&ready_.front())) {
      if (*error) std::rethrow_exception(*error);
      return false;  // the end of the epoch, which stays in the queue
    }
    row = std::get<Row>(std::move(ready_.front()));
    ready_.pop_front();
    changed_.notify_all();
    return true;
  }

  // Elements that were not made yet are left out, which may cost less than to make them.
  void skip(std::int64_t count) override {
    thread_ = {};  // ends after the element that it makes
    while (count > 0 && !ready_.empty()) {
      if (!std::holds_alternative<Row>(ready_.front())) return;  // the end, or an error
      ready_.pop_front();
      --count;
    }
    if (count > 0) input_->skip(count);
  }
  bool skip_examples(std::int64_t count) override {
    return thread_.joinable() ? Cursor::skip_examples(count) : input_->skip_examples(count);
  }

 private:
  // An element, or what the input threw; null at its end.
  using Result = std::variant<Row, std::exception_ptr>;

  Result read() {
    try {
      Row row;
      if (!input_->next(row)) return std::exception_ptr();
      if (row.batch) row = {row.materialize()};  // gathered in this thread, ahead of its use
      return row;
    } catch (...) {
      return std::current_exception();
    }
  }

  void produce(const std::stop_token& stop) {
    bool more = true;
    while (more) {
      Result result = read();
      more = std::holds_alternative<Row>(result);
      std::unique_lock lock(mutex_);
      const bool goes_on = changed_.wait(lock, stop, [this] { return ready_.size() < buffer_size_; });
      ready_.push_back(std::move(result));
      changed_.notify_all();
      if (!goes_on) return;
    }
  }

  std::unique_ptr<Cursor> input_;  // used by the thread alone once it runs
  std::size_t buffer_size_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Result> ready_;  // guarded by mutex_
  std::jthread thread_;       // last: it ends before what it uses
};

}  // namespace

StagePtr make_batch_stage(StagePtr input, std::int64_t size, BatchOptions options) {
  return over(std::move(input), [size, drops = options.drop_remainder](Stage& stage, const StagePtr& from) {
    stage.open = [from, size, drops](std::int64_t epoch) {
      return std::make_unique<BatchCursor>(from->open(epoch), size, drops);
    };
    const auto all = from->cardinality;
    stage.cardinality = all < 0 ? all : drops ? all / size : (all + size - 1) / size;
  });
}

StagePtr make_cache_stage(StagePtr input, const std::string& file) {
  return over(std::move(input), [file](Stage& stage, const StagePtr& from) {
    const auto state = std::make_shared<CacheState>(file);
    stage.open = [from, state](std::int64_t epoch) {
      if (const auto table = state->table()) return table->open(epoch);
      // Caches the first epoch's elements always, so that they do not depend on when training was restarted.
      return filling(from->open(0), from->cardinality, state);
    };
    stage.lies_in_memory = [state] { return state->table() != nullptr; };
    stage.over_files = made_once([from, file](std::int64_t num_shards, std::int64_t index) {
      return make_cache_stage(from->over_files(num_shards, index),
                              file.empty() ? "" : text(file, "-", index, "-of-", num_shards));
    });
  });
}

StagePtr make_prefetch_stage(StagePtr input, std::int64_t buffer_size) {
  return over(std::move(input), [buffer_size](Stage& stage, const StagePtr& from) {
    stage.open = [from, buffer_size](std::int64_t epoch) {
      return std::make_unique<PrefetchCursor>(from->open(epoch), buffer_size);
    };
    stage.lies_in_memory = [] { return false; };
  });
}

}  // namespace lockstep::data
