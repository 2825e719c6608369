// Stages that hold elements: batch, cache, prefetch.
#include <condition_variable>
#include <deque>
#include <map>
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

class BatchStage final : public StageOver<BatchStage> {
 public:
  BatchStage(StagePtr input, std::int64_t size, BatchOptions options)
      : StageOver(std::move(input)), size_(size), options_(options) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    return std::make_unique<BatchCursor>(input_->open(epoch), size_, options_.drop_remainder);
  }
  std::int64_t cardinality() const override {
    const auto all = input_->cardinality();
    if (all < 0) return all;
    return options_.drop_remainder ? all / size_ : (all + size_ - 1) / size_;
  }

 private:
  std::int64_t size_;
  BatchOptions options_;
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

class FillingCursor final : public Cursor {
 public:
  FillingCursor(std::unique_ptr<Cursor> input, std::int64_t cardinality, std::shared_ptr<CacheState> state)
      : input_(std::move(input)), builder_(cardinality > 0 ? cardinality : 1024), state_(std::move(state)) {}

  bool next(Row& row) override {
    if (ended_) return false;
    if (input_->next(row)) {
      row = {row.materialize()};
      builder_.append(row.value);
      return true;
    }
    ended_ = true;
    if (builder_.size() > 0) state_->keep(builder_.finish());
    return false;
  }

 private:
  std::unique_ptr<Cursor> input_;
  TableBuilder builder_;
  std::shared_ptr<CacheState> state_;
  bool ended_ = false;
};

class CacheStage final : public StageOver<CacheStage> {
 public:
  CacheStage(StagePtr input, const std::string& file)
      : StageOver(std::move(input)), file_(file), state_(std::make_shared<CacheState>(file)) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    if (const auto table = state_->table()) return table->open(epoch);
    // Caches the first epoch's elements always, so that they do not depend on when training was restarted.
    return std::make_unique<FillingCursor>(input_->open(0), input_->cardinality(), state_);
  }
  bool lies_in_memory() const override { return state_->table() != nullptr; }
  StagePtr over_files(std::int64_t num_shards, std::int64_t index) const override {
    auto input = input_->over_files(num_shards, index);
    if (input == nullptr) return nullptr;
    const auto suffix = text("-", index, "-of-", num_shards);
    const std::lock_guard lock(parts_->mutex);
    auto& part = parts_->stages[suffix];  // the same stage at each call, so that its cache is kept
    if (part == nullptr) part = std::make_shared<CacheStage>(std::move(input), file_.empty() ? "" : file_ + suffix);
    return part;
  }

 private:
  struct Parts {
    std::mutex mutex;
    std::map<std::string, StagePtr> stages;  // guarded by mutex
  };

  std::string file_;
  std::shared_ptr<CacheState> state_;
  std::shared_ptr<Parts> parts_ = std::make_shared<Parts>();
};

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

class PrefetchStage final : public StageOver<PrefetchStage> {
 public:
  PrefetchStage(StagePtr input, std::int64_t buffer_size) : StageOver(std::move(input)), buffer_size_(buffer_size) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    return std::make_unique<PrefetchCursor>(input_->open(epoch), buffer_size_);
  }
  bool lies_in_memory() const override { return false; }

 private:
  std::int64_t buffer_size_;
};

}  // namespace

StagePtr make_batch_stage(StagePtr input, std::int64_t size, BatchOptions options) {
  return std::make_shared<BatchStage>(std::move(input), size, options);
}

StagePtr make_cache_stage(StagePtr input, const std::string& file) {
  return std::make_shared<CacheStage>(std::move(input), file);
}

StagePtr make_prefetch_stage(StagePtr input, std::int64_t buffer_size) {
  return std::make_shared<PrefetchStage>(std::move(input), buffer_size);
}

}  // namespace lockstep::data
