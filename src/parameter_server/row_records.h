// Records of rows, in memory that grows with their number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/collective/group.h"
#include "parameter_server/id_map.h"

namespace lockstep::parameter_server {

// A table's memory has for each row: the number of the last update, then the values, then the optimizer's states.
// Values and each state have `row_bytes`. One thread at a time.
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
