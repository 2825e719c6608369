#include "parameter_server/table_shard.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/streamed_archive.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

using checkpoint::ArchiveReader;
using checkpoint::ArchiveWriter;
using checkpoint::TensorInfo;

constexpr std::size_t kRowsAtATime = 4096;

std::string ids_of(const TableSpec& table) { return table.name + "/ids"; }
std::string last_updates_of(const TableSpec& table) { return table.name + "/last_update"; }

// Texts of the file.
std::string rows_of(const TableSpec& table) { return table.name + "/rows"; }
std::string initial_values_of(const TableSpec& table) { return table.name + "/initial_values"; }

std::string describe_initial_values(const TableSpec& table) {
  return text("seed ", table.seed, ", kind ", static_cast<int>(table.initializer.kind), ", scale ",
              table.initializer.scale);
}

// The tensors of a row's values and states, as they lie one after the other.
std::vector<std::string> arrays_of(const TableSpec& table, const std::vector<std::string>& states) {
  std::vector<std::string> names{table.name};
  for (const auto& state : states) names.push_back(text("optimizer/", state, "/", table.name));
  return names;
}

// [tensor of the file]: writes its bytes.
using Writers = std::map<std::string, std::function<void(ArchiveWriter& file)>>;

void add_tensors(const TableShard& shard, const TableShard::ClosedCut& cut, const std::vector<std::string>& states,
                 std::map<std::string, TensorInfo>& tensors, Writers& writers) {
  const auto& table = shard.table();
  const auto rows = static_cast<std::int64_t>(cut.rows);
  const auto add = [&](const std::string& name, DType dtype, const std::vector<std::int64_t>& shape,
                       const std::function<std::span<const std::byte>(const TableShard::StoredRow& row)>& bytes_of) {
    tensors[name] = {dtype, shape};
    writers[name] = [&shard, cut, bytes_of](ArchiveWriter& file) {
      shard.for_each(cut, [&](const auto& row) { file.append(bytes_of(row)); });
    };
  };
  const auto bytes_of = [](const std::int64_t& number) { return std::as_bytes(std::span(&number, 1)); };
  add(ids_of(table), DType::int64, {rows}, [=](const auto& row) { return bytes_of(row.id); });
  add(last_updates_of(table), DType::int64, {rows}, [=](const auto& row) { return bytes_of(row.last_update); });
  std::size_t offset = 0;
  for (const auto& name : arrays_of(table, states)) {
    add(name, table.dtype, {rows, table.width},
        [offset, bytes = table.row_bytes()](const auto& row) { return std::span(row.data + offset, bytes); });
    offset += table.row_bytes();
  }
}

// One file of a checkpoint, as a table is read from it.
class TableReader {
 public:
  TableReader(const ArchiveReader& file, const TableSpec& table, const std::vector<std::string>& states)
      : file_(file), table_(table), arrays_(arrays_of(table, states)) {
    const auto& ids = file.info(ids_of(table));
    check_description();
    rows_ = ids.shape.size() == 1 ? static_cast<std::size_t>(ids.shape[0]) : 0;
    const auto count = static_cast<std::int64_t>(rows_);
    expect(ids_of(table), {DType::int64, {count}});
    expect(last_updates_of(table), {DType::int64, {count}});
    for (const auto& name : arrays_) expect(name, {table.dtype, {count, table.width}});
  }

  // Gives the rows that are the server's.
  void give(ServerNumber server, TableShard& to) const {
    std::vector<std::int64_t> ids(kRowsAtATime), last_updates(kRowsAtATime);
    std::vector<std::vector<std::byte>> arrays(arrays_.size());
    const auto row = table_.row_bytes();
    std::vector<std::byte> data(arrays_.size() * row);
    for (std::size_t begin = 0; begin < rows_; begin += kRowsAtATime) {
      const auto count = std::min(kRowsAtATime, rows_ - begin);
      ids.resize(count);
      last_updates.resize(count);
      file_.read(ids_of(table_), begin * sizeof(std::int64_t), std::as_writable_bytes(std::span(ids)));
      file_.read(last_updates_of(table_), begin * sizeof(std::int64_t),
                 std::as_writable_bytes(std::span(last_updates)));
      check_ids(table_, ids);
      for (std::size_t k = 0; k < arrays.size(); ++k) {
        arrays[k].resize(count * row);
        file_.read(arrays_[k], begin * row, arrays[k]);
      }
      for (std::size_t i = 0; i < count; ++i) {
        if (server_of_row(ids[i], server.count) != server.index) continue;
        for (std::size_t k = 0; k < arrays.size(); ++k) std::memcpy(&data[k * row], &arrays[k][i * row], row);
        to.add_row({ids[i], last_updates[i], data.data()});
      }
    }
  }

 private:
  // A table may have grown.
  void check_description() const {
    const auto rows = file_.entry(rows_of(table_));
    if (const auto stored = whole_number(rows); !stored || *stored > table_.rows) {
      throw InvalidArgument(
          text("the checkpoint's table \"", table_.name, "\" has ", rows, " rows; the model's has ", table_.rows));
    }
    if (const auto initial = file_.entry(initial_values_of(table_)); initial != describe_initial_values(table_)) {
      log_warning(text("rows of the table \"", table_.name, "\" that no step has updated have other initial values (",
                       describe_initial_values(table_), ") than when the checkpoint was written (", initial, ")"));
    }
  }

  void expect(const std::string& name, const TensorInfo& wanted) const {
    const auto& found = file_.info(name);
    if (found.dtype == wanted.dtype && found.shape == wanted.shape) return;
    throw InvalidArgument(text("the checkpoint's ", name, " is ", name_of(found.dtype), " [", join(found.shape),
                               "]; the model's table \"", table_.name, "\" needs ", name_of(wanted.dtype), " [",
                               join(wanted.shape), "]"));
  }

  const ArchiveReader& file_;
  const TableSpec& table_;
  const std::vector<std::string> arrays_;
  std::size_t rows_ = 0;
};

// Returns the files that have rows of the server: with as many servers as wrote them its own, else all.
std::vector<std::filesystem::path> files_for(ServerNumber server, const checkpoint::ShardedArchive& archive) {
  const auto servers = archive.main().integer(checkpoint::kTablesServers);
  const auto folder =
      checkpoint::path_inside(checkpoint::rows_folder(archive.path()), archive.main().entry(checkpoint::kTablesFolder));
  if (folder.empty() || servers < 1) {
    throw DataError(text("the checkpoint ", archive.path(), " does not say where the rows of its tables are"));
  }
  std::vector<std::filesystem::path> files;
  for (std::int64_t i = 0; i < servers; ++i) {
    if (servers != server.count || i == server.index) {
      files.push_back(checkpoint::tables_file(
          folder / checkpoint::name_of_part("ps", static_cast<int>(i), static_cast<int>(servers))));
    }
  }
  return files;
}

}  // namespace

std::optional<std::int64_t> save_tables(TableShards tables, const std::vector<std::string>& states, std::int64_t end,
                                        const std::filesystem::path& file) {
  std::int64_t updates = 0;
  std::vector<TableShard::ClosedCut> cuts;
  const std::shared_ptr<void> ends(nullptr, [&](void*) {
    for (std::size_t i = 0; i < cuts.size(); ++i) tables[i]->end_cut(cuts[i]);
  });
  std::map<std::string, TensorInfo> tensors;
  Writers writers;
  std::map<std::string, std::string> entries;
  for (const auto& table : tables) {
    const auto cut = table->close_cut(end);
    if (!cut) return std::nullopt;
    cuts.push_back(*cut);
    updates = std::max(updates, cut->updates);
    add_tensors(*table, *cut, states, tensors, writers);
    entries[rows_of(table->table())] = std::to_string(table->table().rows);
    entries[initial_values_of(table->table())] = describe_initial_values(table->table());
  }
  ArchiveWriter writer(file, entries, tensors);
  for (const auto& [name, write] : writers) write(writer);
  writer.finish();
  return updates;
}

void list_tables(Archive& main, const std::string& folder, int servers) {
  main.entries[checkpoint::kTablesFolder] = folder;
  main.entries[checkpoint::kTablesServers] = std::to_string(servers);
}

void restore_tables(TableShards tables, const std::vector<std::string>& states, ServerNumber server,
                    const checkpoint::ShardedArchive& archive, const SavedSteps& steps, bool change) {
  if (tables.empty()) return;
  std::vector<std::unique_ptr<ArchiveReader>> files;
  for (const auto& file : files_for(server, archive)) files.push_back(std::make_unique<ArchiveReader>(file));
  for (const auto& table : tables) {
    std::vector<TableReader> readers;
    for (const auto& file : files) readers.emplace_back(*file, table->table(), states);
    if (!change) continue;
    table->clear();
    for (const auto& reader : readers) reader.give(server, *table);
    table->begin_at(steps);
  }
}

}  // namespace lockstep::parameter_server
