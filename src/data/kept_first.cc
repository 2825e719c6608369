// keeping_first: the first element of an epoch is looked at, and comes again out of the next iterator.
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

}  // namespace

StagePtr make_kept_first_stage(StagePtr input) {
  struct Kept {
    std::mutex mutex;
    std::optional<Begun> begun;  // guarded by mutex

    bool is_of(std::int64_t epoch) const { return begun && begun->epoch == epoch; }
  };
  return over(std::move(input), [](Stage& stage, const StagePtr& from) {
    const auto kept = std::make_shared<Kept>();
    stage.open = [from, kept](std::int64_t epoch) -> std::unique_ptr<Cursor> {
      const std::lock_guard lock(kept->mutex);
      if (kept->is_of(epoch)) return std::make_unique<KeptFirstCursor>(*std::exchange(kept->begun, std::nullopt), from);
      kept->begun.reset();  // nobody asks for it any more, and it may hold a shuffle's buffer
      return from->open(epoch);
    };
    stage.keep_first = [from, kept](std::int64_t epoch, Row& row) {
      const std::lock_guard lock(kept->mutex);
      if (!kept->is_of(epoch)) {
        Begun begun{.epoch = epoch, .cursor = from->open(epoch), .first = std::nullopt};
        Row read;
        if (begun.cursor->next(read)) begun.first = std::move(read);
        kept->begun = std::move(begun);
      }
      if (kept->begun->first) row = *kept->begun->first;
      return kept->begun->first.has_value();
    };
    stage.over_files = made_once([from](std::int64_t num_shards, std::int64_t index) {
      return make_kept_first_stage(from->over_files(num_shards, index));
    });
  });
}

}  // namespace lockstep::data
