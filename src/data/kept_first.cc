// keeping_first: the first element of an epoch is looked at, and comes again out of the next iterator.
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "data/stage.h"

namespace lockstep::data {
namespace {

// An epoch whose first element was read.
struct Begun {
  std::int64_t epoch = 0;
  std::unique_ptr<Cursor> cursor;  // after the first element
  std::optional<Row> first;        // nothing: the epoch is empty
};

class KeptFirstCursor final : public Cursor {
 public:
  KeptFirstCursor(Begun begun, StagePtr input) : begun_(std::move(begun)), input_(std::move(input)) {}

  bool next(Row& row) override {
    if (std::exchange(before_first_, false)) {
      if (begun_.first)
        row = *std::exchange(begun_.first, std::nullopt);
      else
        ended_ = true;
      return !ended_;
    }
    return !ended_ && begun_.cursor->next(row);
  }
  void skip(std::int64_t count) override {
    Row row;
    if (count > 0 && before_first_) {
      if (!next(row)) return;
      --count;
    }
    if (count > 0) begun_.cursor->skip(count);
  }
  // Batches may begin elsewhere than those that were read.
  bool skip_examples(std::int64_t count) override {
    if (count == 0) return true;
    before_first_ = false;
    begun_.cursor = input_->open(begun_.epoch);
    return begun_.cursor->skip_examples(count);
  }

 private:
  Begun begun_;
  StagePtr input_;
  bool before_first_ = true, ended_ = false;
};

class KeptFirstStage final : public StageOver<KeptFirstStage> {
 public:
  explicit KeptFirstStage(StagePtr input) : StageOver(std::move(input)), state_(std::make_shared<State>()) {}

  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    const std::lock_guard lock(state_->mutex);
    if (!state_->begun || state_->begun->epoch != epoch) {
      state_->begun.reset();  // nobody asks for it any more, and it may hold a shuffle's buffer
      return input_->open(epoch);
    }
    return std::make_unique<KeptFirstCursor>(*std::exchange(state_->begun, std::nullopt), input_);
  }

  bool first(std::int64_t epoch, Row& row) const override {
    const std::lock_guard lock(state_->mutex);
    if (!state_->begun || state_->begun->epoch != epoch) {
      Begun begun{.epoch = epoch, .cursor = input_->open(epoch), .first = std::nullopt};
      Row read;
      if (begun.cursor->next(read)) begun.first = std::move(read);
      state_->begun = std::move(begun);
    }
    if (state_->begun->first) row = *state_->begun->first;
    return state_->begun->first.has_value();
  }

  StagePtr over_files(std::int64_t num_shards, std::int64_t index) const override {
    const std::lock_guard lock(state_->mutex);
    auto& part = state_->parts[{num_shards, index}];  // the same stage at each call, so that its element is kept
    if (part == nullptr) {
      auto input = input_->over_files(num_shards, index);
      if (input != nullptr) part = std::make_shared<KeptFirstStage>(std::move(input));
    }
    return part;
  }

 private:
  struct State {
    std::mutex mutex;
    std::optional<Begun> begun;                                       // guarded by mutex, like parts
    std::map<std::pair<std::int64_t, std::int64_t>, StagePtr> parts;  // by number of shards, and index
  };
  std::shared_ptr<State> state_;
};

}  // namespace

StagePtr make_kept_first_stage(StagePtr input) { return std::make_shared<KeptFirstStage>(std::move(input)); }

}  // namespace lockstep::data
