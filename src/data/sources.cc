// Where examples come from: tensors and generators.
#include <ATen/ops/select.h>

#include "data/stage.h"
#include "data/table_builder.h"

namespace lockstep {
namespace {

Tensor row_of(const Tensor& table, std::int64_t index) { return table.defined() ? table.select(0, index) : Tensor(); }

class TableCursor final : public Cursor {
 public:
  explicit TableCursor(std::shared_ptr<const Example> table) : table_(std::move(table)), end_(table_->size()) {}

  bool next(Row& row) override {
    if (at_ >= end_) return false;
    row = {.table = table_, .index = at_++};
    return true;
  }
  void skip(std::int64_t count) override { at_ += count; }

 private:
  std::shared_ptr<const Example> table_;
  std::int64_t end_;
  std::int64_t at_ = 0;
};

class TableStage final : public Stage {
 public:
  explicit TableStage(Example table) : table_(std::make_shared<const Example>(std::move(table))) {}
  std::unique_ptr<Cursor> open(std::int64_t) const override { return std::make_unique<TableCursor>(table_); }
  std::int64_t cardinality() const override { return table_->size(); }
  bool lies_in_memory() const override { return true; }

 private:
  std::shared_ptr<const Example> table_;
};

class GeneratorCursor final : public Cursor {
 public:
  explicit GeneratorCursor(Dataset::Generator generator) : generator_(std::move(generator)) {}

  bool next(Row& row) override {
    auto example = ended_ ? std::nullopt : generator_();
    ended_ = !example;  // it is not asked again
    if (ended_) return false;
    row = {*std::move(example)};
    return true;
  }

 private:
  Dataset::Generator generator_;
  bool ended_ = false;
};

class GeneratorStage final : public Stage {
 public:
  GeneratorStage(std::function<Dataset::Generator()> make, std::int64_t cardinality)
      : make_(std::move(make)), cardinality_(cardinality) {}
  std::unique_ptr<Cursor> open(std::int64_t) const override { return std::make_unique<GeneratorCursor>(make_()); }
  std::int64_t cardinality() const override { return cardinality_; }

 private:
  std::function<Dataset::Generator()> make_;
  std::int64_t cardinality_;
};

}  // namespace

Example Row::materialize() const {
  if (table == nullptr) return value;
  if (batch) return gather_rows(*table, *batch);
  return {row_of(table->x, index), row_of(table->y, index), row_of(table->weight, index)};
}

StagePtr make_table_stage(Example table) { return std::make_shared<TableStage>(std::move(table)); }

StagePtr make_generator_stage(std::function<Dataset::Generator()> make, std::int64_t cardinality) {
  return std::make_shared<GeneratorStage>(std::move(make), cardinality);
}

}  // namespace lockstep
