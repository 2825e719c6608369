// Stages without an input: examples come from tensors, generators and files.
#include <optional>
#include <utility>

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

// A file among those of a data set. Random numbers drawn while reading it depend only on its position there.
struct File {
  std::string path;
  std::uint64_t seed;
};
using ReadFile = std::function<Dataset(const std::string&)>;

StagePtr stage_of_files(std::vector<File> files, const ReadFile& read) {
  const auto shared = std::make_shared<const std::vector<File>>(std::move(files));
  const auto open = [shared, read](std::int64_t epoch) {
    return cursor_of(
        [shared, read, epoch, at = std::size_t{0}, file = std::optional<DatasetIterator>()](Row& row) mutable {
          while (true) {  // one file after the other
            if (file) {
              auto example = file->next();
              if (example) row = {*std::move(example)};
              if (example) return true;
              file.reset();
            }
            if (at == shared->size()) return false;
            const auto& next = (*shared)[at++];
            const SeedScope seeds(next.seed);
            file.emplace(read(next.path).iterate({.epoch = epoch}));
          }
        });
  };
  const auto over_files = [shared, read](std::int64_t num_shards, std::int64_t index) {
    std::vector<File> mine;
    for (auto i = static_cast<std::size_t>(index); i < shared->size(); i += static_cast<std::size_t>(num_shards)) {
      mine.push_back((*shared)[i]);
    }
    return stage_of_files(std::move(mine), read);
  };
  return std::make_shared<const Stage>(
      Stage{.open = open, .files = static_cast<std::int64_t>(shared->size()), .over_files = over_files});
}

}  // namespace

StagePtr make_table_stage(Example table) {
  const auto shared = std::make_shared<const Example>(std::move(table));
  return std::make_shared<const Stage>(
      Stage{.open = [shared](std::int64_t) { return std::make_unique<TableCursor>(shared); },
            .cardinality = shared->size(),
            .lies_in_memory = [] { return true; }});
}

StagePtr make_files_stage(std::vector<std::string> paths, ReadFile read) {
  const auto seed = next_random_seed();
  std::vector<File> files;
  for (auto& path : paths) files.push_back({std::move(path), mix(seed, files.size())});
  return stage_of_files(std::move(files), read);
}

StagePtr make_generator_stage(std::function<Dataset::Generator()> make, std::int64_t cardinality) {
  const auto open = [make = std::move(make)](std::int64_t) {
    return cursor_of([generator = make(), ended = false](Row& row) mutable {
      auto example = ended ? std::nullopt : generator();
      ended = !example;  // the generator is not called again
      if (example) row = {*std::move(example)};
      return !ended;
    });
  };
  return std::make_shared<const Stage>(Stage{.open = open, .cardinality = cardinality});
}

// Stages over an input have these functions in common.

}  // namespace lockstep::data
