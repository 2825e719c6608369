// Where examples come from: tensors and generators.
#include <ATen/ops/select.h>

#include "base/hash.h"
#include "data/stage.h"
#include "data/tables.h"
#include "lockstep/base/random.h"

namespace lockstep::data {
namespace {

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
    ended_ = !example;  // the generator is not called again
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

// A file among those of a data set. Random numbers drawn while reading it depend only on its position there.
struct File {
  std::string path;
  std::uint64_t seed;
};
using Files = std::shared_ptr<const std::vector<File>>;
using ReadFile = std::function<Dataset(const std::string&)>;

// One file after the other.
class FilesCursor final : public Cursor {
 public:
  FilesCursor(Files files, ReadFile read, std::int64_t epoch)
      : files_(std::move(files)), read_(std::move(read)), epoch_(epoch) {}

  bool next(Row& row) override {
    while (true) {
      if (open_) {
        auto example = open_->next();
        if (example) row = {*std::move(example)};
        if (example) return true;
        open_.reset();
      }
      if (at_ == files_->size()) return false;
      const auto& file = (*files_)[at_++];
      const SeedScope seeds(file.seed);
      open_.emplace(read_(file.path).iterate({.epoch = epoch_}));
    }
  }

 private:
  Files files_;
  ReadFile read_;
  std::int64_t epoch_;
  std::size_t at_ = 0;
  std::optional<DatasetIterator> open_;
};

class FilesStage final : public Stage {
 public:
  FilesStage(Files files, ReadFile read) : files_(std::move(files)), read_(std::move(read)) {}
  std::unique_ptr<Cursor> open(std::int64_t epoch) const override {
    return std::make_unique<FilesCursor>(files_, read_, epoch);
  }
  std::int64_t cardinality() const override { return Dataset::kUnknown; }
  std::int64_t files() const override { return static_cast<std::int64_t>(files_->size()); }
  StagePtr over_files(std::int64_t num_shards, std::int64_t index) const override {
    std::vector<File> mine;
    for (auto i = static_cast<std::size_t>(index); i < files_->size(); i += static_cast<std::size_t>(num_shards)) {
      mine.push_back((*files_)[i]);
    }
    return std::make_shared<FilesStage>(std::make_shared<const std::vector<File>>(std::move(mine)), read_);
  }

 private:
  Files files_;
  ReadFile read_;
};

}  // namespace

StagePtr make_table_stage(Example table) { return std::make_shared<TableStage>(std::move(table)); }

StagePtr make_files_stage(std::vector<std::string> paths, ReadFile read) {
  const auto seed = next_random_seed();
  std::vector<File> files;
  for (auto& path : paths) files.push_back({std::move(path), mix(seed, files.size())});
  return std::make_shared<FilesStage>(std::make_shared<const std::vector<File>>(std::move(files)), std::move(read));
}

StagePtr make_generator_stage(std::function<Dataset::Generator()> make, std::int64_t cardinality) {
  return std::make_shared<GeneratorStage>(std::move(make), cardinality);
}

}  // namespace lockstep::data
