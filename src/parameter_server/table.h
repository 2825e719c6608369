// Tables of embeddings, whose rows are spread over servers: their descriptions, sets and records of their rows, and
// maps of ids.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "lockstep/collective/group.h"
#include "lockstep/parameter_server/row_initializer.h"

namespace lockstep::parameter_server {

// A hash table from 64-bit ids to 32-bit numbers. Open addressing with linear probing, at most two thirds full, 16
// bytes an entry. Unlike libraries' maps, this one can load an id's entry into the cache before the look-up. In a table
// of a gigabyte each look-up is a cache miss, and a batch has thousands.
class IdMap {
 public:
  IdMap() = default;
  explicit IdMap(std::size_t expected) {
    while (3 * expected > 2 * entries_.size()) grow();
  }

  std::size_t size() const { return size_; }
  void prefetch(std::int64_t id) const { __builtin_prefetch(&entries_[place_of(id)]); }

  // Null where the id is not there. Valid until the next insert or erase.
  const std::uint32_t* find(std::int64_t id) const {
    for (auto at = place_of(id);; at = next(at)) {
      if (!entries_[at].used) return nullptr;
      if (entries_[at].id == id) return &entries_[at].number;
    }
  }
  std::uint32_t* find(std::int64_t id) { return const_cast<std::uint32_t*>(std::as_const(*this).find(id)); }

  // The number of the id, which is `number` where it was not there.
  std::uint32_t& insert(std::int64_t id, std::uint32_t number) {
    if (auto* const found = find(id)) return *found;
    if (3 * (size_ + 1) > 2 * entries_.size()) grow();
    ++size_;
    return place(id, number);
  }

  void erase(std::int64_t id);

  // Calls act(id, number) for each.
  template <class Act>
  void for_each(const Act& act) const {
    for (const auto& entry : entries_) {
      if (entry.used) act(entry.id, entry.number);
    }
  }

 private:
  struct Entry {
    std::int64_t id = 0;
    std::uint32_t number = 0;
    bool used = false;
  };
  std::size_t place_of(std::int64_t id) const { return mix(static_cast<std::uint64_t>(id)) >> shift_; }
  std::size_t next(std::size_t at) const { return (at + 1) & (entries_.size() - 1); }
  std::uint32_t& place(std::int64_t id, std::uint32_t number);
  void grow();

  std::size_t size_ = 0;
  int shift_ = 60;  // 64 less the bits of a place
  std::vector<Entry> entries_ = std::vector<Entry>(16);
};

// Calls act(T()), where T is the type of elements of float32 or float64.
template <class Act>
auto with_element(DType dtype, const Act& act) {
  return dtype == DType::float64 ? act(double()) : act(float());
}

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

// Records of rows, in memory that grows with their number. A table's memory has for each row: the number of the last
// update, then the values, then the optimizer's states. Values and each state have `row_bytes`. One thread at a time.
class RowRecords {
 public:
  RowRecords(std::size_t row_bytes, std::size_t states);

  // Records stay where they are until they are erased.
  class Record {
   public:
    Record() = default;
    explicit Record(std::byte* at) : at_(at) {}
    explicit operator bool() const { return at_ != nullptr; }
    std::int64_t& last_update() const { return *reinterpret_cast<std::int64_t*>(at_); }
    std::byte* data() const { return at_ + sizeof(std::int64_t); }  // the values, then the states
    std::byte* begin() const { return at_; }
    void copy_of(Record other, std::size_t bytes) const { std::copy_n(other.at_, bytes, at_); }

   private:
    std::byte* at_ = nullptr;
  };

  std::size_t size() const { return map_.size(); }
  std::size_t record_bytes() const { return record_bytes_; }

  Record find(std::int64_t id) const;

  // Finds each id's record, or none: faster than one after the other.
  void find(std::span<const std::int64_t> ids, std::vector<Record>& records) const;

  // A record, of an id that has none, with any contents.
  Record make(std::int64_t id);
  void erase(std::int64_t id);

  // Records lie in slots 0 to slots() - 1, of which some are empty. A record keeps its slot.
  std::size_t slots() const { return ids_.size(); }
  std::int64_t id_in(std::size_t slot) const { return ids_[slot]; }  // -1: empty
  Record at(std::size_t slot) const {
    return Record(chunks_[slot / per_chunk_].get() + slot % per_chunk_ * record_bytes_);
  }

 private:
  std::size_t record_bytes_, per_chunk_;
  IdMap map_;                        // from ids to slots
  std::vector<std::int64_t> ids_;    // [slot]
  std::vector<std::uint32_t> free_;  // slots without a record
  std::vector<Memory> chunks_;
};

}  // namespace lockstep::parameter_server
