// A hash table from 64-bit ids to 32-bit numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/hash.h"

namespace lockstep::parameter_server {

// Open addressing with linear probing, at most two thirds full, 16 bytes an entry. Unlike libraries' maps, this one can
// load an id's entry into the cache before the look-up. In a table of a gigabyte each look-up is a cache miss, and a
// batch has thousands.
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

}  // namespace lockstep::parameter_server
