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
    for (const auto all = input_->cardinality; all > 0 && count >= all && cursor_ == nullptr && pass_ != end_;
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

// Maps a random number to one below `bound`, uniformly, by the high half of a product (Lemire 2019; its bias of
// bound / 2^64 is left in).
std::size_t below(std::size_t bound, std::uint64_t random) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::size_t>((static_cast<Wide>(random) * bound) >> 64);
}

// Draws from a buffer of the input's elements.
std::unique_ptr<Cursor> shuffled(std::unique_ptr<Cursor> input, std::size_t buffer_size, std::uint64_t seed) {
  return cursor_of([input = std::move(input), buffer_size, seed, drawn = std::uint64_t{0}, buffer = std::vector<Row>(),
                    ended = false](Row& row) mutable {
    while (!ended && buffer.size() < buffer_size) {
      Row incoming;
      ended = !input->next(incoming);
      if (!ended) buffer.push_back(std::move(incoming));
    }
    if (buffer.empty()) return false;
    std::swap(buffer[below(buffer.size(), mix(seed, ++drawn))], buffer.back());
    row = std::move(buffer.back());
    buffer.pop_back();
    return true;
  });
}

}  // namespace

// Take, skip and shard count elements of all files together, so these have no files.

StagePtr make_take_stage(StagePtr input, std::int64_t count) {
  return over(std::move(input), [count](Stage& stage, const StagePtr& from) {
    stage.open = [from, count](std::int64_t epoch) { return std::make_unique<TakeCursor>(from->open(epoch), count); };
    const auto all = from->cardinality;
    stage.cardinality = all == Dataset::kInfinite ? count : all < 0 ? all : std::min(all, count);
    stage.files = 0;
  });
}

StagePtr make_skip_stage(StagePtr input, std::int64_t count) {
  return over(std::move(input), [count](Stage& stage, const StagePtr& from) {
    stage.open = [from, count](std::int64_t epoch) {
      auto cursor = from->open(epoch);
      cursor->skip(count);
      return cursor;
    };
    const auto all = from->cardinality;
    stage.cardinality = all < 0 ? all : std::max<std::int64_t>(0, all - count);
    stage.files = 0;
  });
}

StagePtr make_shard_stage(StagePtr input, std::int64_t num_shards, std::int64_t index) {
  return over(std::move(input), [num_shards, index](Stage& stage, const StagePtr& from) {
    stage.open = [from, num_shards, index](std::int64_t epoch) {
      return std::make_unique<ShardCursor>(from->open(epoch), num_shards, index);
    };
    const auto all = from->cardinality;
    stage.cardinality = all < 0 ? all : (all - index + num_shards - 1) / num_shards;
    stage.files = 0;
  });
}

StagePtr make_repeat_stage(StagePtr input, std::int64_t count) {
  return over(std::move(input), [count](Stage& stage, const StagePtr& from) {
    stage.open = [from, count](std::int64_t epoch) {
      return std::make_unique<RepeatCursor>(from, count < 0 ? epoch : epoch * count, count);
    };
    const auto all = from->cardinality;
    const bool endless = all == Dataset::kInfinite || count < 0;
    stage.cardinality = all == 0 || count == 0 ? 0 : endless ? Dataset::kInfinite : all < 0 ? all : all * count;
  });
}

StagePtr make_shuffle_stage(StagePtr input, std::int64_t buffer_size, ShuffleOptions options) {
  const auto seed = options.seed ? mix(*options.seed) : next_random_seed();
  return over(std::move(input), [size = static_cast<std::size_t>(buffer_size), seed,
                                 anew = options.reshuffle_each_iteration](Stage& stage, const StagePtr& from) {
    stage.open = [from, size, seed, anew](std::int64_t epoch) {
      return shuffled(from->open(epoch), size, mix(seed, anew ? static_cast<std::uint64_t>(epoch) : 0));
    };
  });
}

}  // namespace lockstep::data
