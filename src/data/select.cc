// Stages that choose among elements without looking at them: take, skip, shard, repeat, shuffle.
#include <algorithm>

#include "base/hash.h"
#include "data/stage.h"
#include "lockstep/base/random.h"

namespace lockstep::data {
namespace {

class TakeCursor final : public Cursor {
 public:
  TakeCursor(std::unique_ptr<Cursor> input, std::int64_t count) : input_(std::move(input)), left_(count) {}

  bool next(Row& row) override {
    if (left_ <= 0 || !input_->next(row)) return false;
    --left_;
    return true;
  }
  void skip(std::int64_t count) override {
    count = std::min(count, left_);
    input_->skip(count);
    left_ -= count;
  }

 private:
  std::unique_ptr<Cursor> input_;
  std::int64_t left_;
};

class TakeStage final : public StageOver<TakeStage> {
 public:
  TakeStage(StagePtr input, std::int64_t count) : StageOver(std::move(input)), count_(count) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    return std::make_unique<TakeCursor>(input_->open(epoch), count_);
  }
  std::int64_t cardinality() const override {
    const auto all = input_->cardinality();
    if (all == Dataset::kInfinite) return count_;
    return all < 0 ? all : std::min(all, count_);
  }

  std::int64_t files() const override { return 0; }  // this stage counts elements of all files together
 private:
  std::int64_t count_;
};

class SkipStage final : public StageOver<SkipStage> {
 public:
  SkipStage(StagePtr input, std::int64_t count) : StageOver(std::move(input)), count_(count) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    auto cursor = input_->open(epoch);
    cursor->skip(count_);
    return cursor;
  }
  std::int64_t cardinality() const override {
    const auto all = input_->cardinality();
    return all < 0 ? all : std::max<std::int64_t>(0, all - count_);
  }

  std::int64_t files() const override { return 0; }  // this stage counts elements of all files together
 private:
  std::int64_t count_;
};

class ShardCursor final : public Cursor {
 public:
  ShardCursor(std::unique_ptr<Cursor> input, std::int64_t num_shards, std::int64_t index)
      : input_(std::move(input)), num_shards_(num_shards), before_(index) {}

  bool next(Row& row) override {
    input_->skip(before_);
    before_ = num_shards_ - 1;
    return input_->next(row);
  }
  void skip(std::int64_t count) override { before_ += count * num_shards_; }

 private:
  std::unique_ptr<Cursor> input_;
  std::int64_t num_shards_;
  std::int64_t before_;  // elements of other shards before the next of this one
};

class ShardStage final : public StageOver<ShardStage> {
 public:
  ShardStage(StagePtr input, std::int64_t num_shards, std::int64_t index)
      : StageOver(std::move(input)), num_shards_(num_shards), index_(index) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    return std::make_unique<ShardCursor>(input_->open(epoch), num_shards_, index_);
  }
  std::int64_t cardinality() const override {
    const auto all = input_->cardinality();
    return all < 0 ? all : (all - index_ + num_shards_ - 1) / num_shards_;
  }

  std::int64_t files() const override { return 0; }  // this stage counts elements of all files together
 private:
  std::int64_t num_shards_;
  std::int64_t index_;
};

class RepeatCursor final : public Cursor {
 public:
  // Passes are numbered through all epochs, so that no two of them shuffle alike.
  RepeatCursor(StagePtr input, std::int64_t first_pass, std::int64_t passes)
      : input_(std::move(input)), pass_(first_pass), end_(passes < 0 ? -1 : first_pass + passes) {}

  bool next(Row& row) override {
    while (pass_ != end_) {
      if (cursor_ == nullptr) cursor_ = input_->open(pass_);
      if (cursor_->next(row)) {
        empty_ = false;
        return true;
      }
      if (empty_) return false;  // else repeating an empty input forever would never return
      cursor_.reset();
      ++pass_;
      empty_ = true;
    }
    return false;
  }

  void skip(std::int64_t count) override {
    for (const auto all = input_->cardinality(); all > 0 && count >= all && cursor_ == nullptr && pass_ != end_;
         count -= all) {
      ++pass_;
    }
    Cursor::skip(count);
  }

  // Passes that end before the example are read and counted; the pass that contains it is opened again and skips to it.
  bool skip_examples(std::int64_t count) override {
    while (count > 0 && pass_ != end_) {
      const auto pass = input_->open(pass_);
      std::int64_t examples = 0;
      for (Row row; examples <= count && pass->next(row);) examples += row.examples();
      if (examples > count || examples == 0) {
        cursor_ = input_->open(pass_);
        empty_ = examples == 0;
        return cursor_->skip_examples(count);
      }
      count -= examples;
      ++pass_;
    }
    return true;
  }

 private:
  StagePtr input_;
  std::unique_ptr<Cursor> cursor_;
  std::int64_t pass_;
  std::int64_t end_;
  bool empty_ = true;  // the current pass has yielded nothing yet
};

class RepeatStage final : public StageOver<RepeatStage> {
 public:
  RepeatStage(StagePtr input, std::int64_t count) : StageOver(std::move(input)), count_(count) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    const auto first_pass = count_ < 0 ? epoch : epoch * count_;
    return std::make_unique<RepeatCursor>(input_, first_pass, count_);
  }
  std::int64_t cardinality() const override {
    const auto all = input_->cardinality();
    if (all == 0 || count_ == 0) return 0;
    if (all == Dataset::kInfinite || count_ < 0) return Dataset::kInfinite;
    return all < 0 ? all : all * count_;
  }

 private:
  std::int64_t count_;
};

class ShuffleCursor final : public Cursor {
 public:
  ShuffleCursor(std::unique_ptr<Cursor> input, std::int64_t buffer_size, std::uint64_t seed)
      : input_(std::move(input)), buffer_size_(static_cast<std::size_t>(buffer_size)), seed_(seed) {}

  bool next(Row& row) override {
    while (!ended_ && buffer_.size() < buffer_size_) {
      Row incoming;
      if (input_->next(incoming)) {
        buffer_.push_back(std::move(incoming));
      } else {
        ended_ = true;
      }
    }
    if (buffer_.empty()) return false;
    std::swap(buffer_[draw(buffer_.size())], buffer_.back());
    row = std::move(buffer_.back());
    buffer_.pop_back();
    return true;
  }

 private:
  // Uniform below `bound`, by the high half of a product (Lemire 2019; its bias of bound / 2^64 is left in).
  std::size_t draw(std::size_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::size_t>((static_cast<Wide>(mix(seed_, ++drawn_)) * bound) >> 64);
  }

  std::unique_ptr<Cursor> input_;
  std::size_t buffer_size_;
  std::uint64_t seed_;
  std::uint64_t drawn_ = 0;
  std::vector<Row> buffer_;
  bool ended_ = false;
};

class ShuffleStage final : public StageOver<ShuffleStage> {
 public:
  ShuffleStage(StagePtr input, std::int64_t buffer_size, ShuffleOptions options)
      : StageOver(std::move(input)),
        buffer_size_(buffer_size),
        seed_(options.seed ? mix(*options.seed) : next_random_seed()),
        anew_(options.reshuffle_each_iteration) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    const auto seed = mix(seed_, anew_ ? static_cast<std::uint64_t>(epoch) : 0);
    return std::make_unique<ShuffleCursor>(input_->open(epoch), buffer_size_, seed);
  }

 private:
  std::int64_t buffer_size_;
  std::uint64_t seed_;
  bool anew_;
};

}  // namespace

StagePtr make_take_stage(StagePtr input, std::int64_t count) {
  return std::make_shared<TakeStage>(std::move(input), count);
}
StagePtr make_skip_stage(StagePtr input, std::int64_t count) {
  return std::make_shared<SkipStage>(std::move(input), count);
}

StagePtr make_shard_stage(StagePtr input, std::int64_t num_shards, std::int64_t index) {
  return std::make_shared<ShardStage>(std::move(input), num_shards, index);
}

StagePtr make_repeat_stage(StagePtr input, std::int64_t count) {
  return std::make_shared<RepeatStage>(std::move(input), count);
}

StagePtr make_shuffle_stage(StagePtr input, std::int64_t buffer_size, ShuffleOptions options) {
  return std::make_shared<ShuffleStage>(std::move(input), buffer_size, options);
}

}  // namespace lockstep::data
