// A table of embeddings, whose rows are spread over servers: its description, and sets of its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/collective/group.h"
#include "lockstep/parameter_server/row_initializer.h"
#include "parameter_server/id_map.h"

namespace lockstep::parameter_server {

// A table as all processes of a job know it.
struct TableSpec {
  std::string name;
  DType dtype = DType::float32;  // or float64
  std::int64_t rows = 0;         // ids are from 0 to rows - 1
  std::int64_t width = 0;        // elements of a row
  RowInitializer initializer = "uniform";
  std::uint64_t seed = 0;
  std::int64_t admit_after = 0;  // a row is made by the update that is its admit_after-th; 0: by the first
  std::int64_t evict_after = 0;  // a row that so many steps have not updated is removed; 0: never

  std::size_t row_bytes() const { return static_cast<std::size_t>(width) * size_of(dtype); }
};

// Throws InvalidArgument, naming the table, for a number that is out of range.
void check(const TableSpec& table);

// Throws InvalidArgument, naming table and id, for one that is out of range.
void check_ids(const TableSpec& table, std::span<const std::int64_t> ids);

// The server that has the row: a hash of its id, so that frequent ids are spread whatever their pattern.
int server_of_row(std::int64_t id, int servers);

// Returns where each server's rows end, in ids that are ordered by server_of_row. Throws Error where they are not.
std::vector<std::size_t> ends_of_servers(std::span<const std::int64_t> ids, int servers);

// Writes `table.width` elements.
void write_initial_values(const TableSpec& table, std::int64_t id, std::byte* values);

// Rows of a table, each at most once, and a value or a gradient of each: [ids, width]. Does not own them.
struct Rows {
  std::span<const std::int64_t> ids = {};
  const std::byte* values = nullptr;
};

// The sums of rows with equal ids. The parts' ids, and so the result's, are ordered by server_of_row, and then as they
// first appear. Each sum is added up in the order of `parts`.
class SumOfRows {
 public:
  SumOfRows(const TableSpec& table, std::span<const Rows> parts, int servers = 1);
  Rows rows() const { return {ids_, values_.data()}; }

 private:
  void add(const TableSpec& table, const Rows& part, std::size_t begin, std::size_t end);

  IdMap places_;
  std::vector<std::int64_t> ids_;
  std::vector<std::byte> values_;
};

}  // namespace lockstep::parameter_server
