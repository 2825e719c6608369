#include "parameter_server/table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <numbers>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

std::uint32_t& IdMap::place(std::int64_t id, std::uint32_t number) {
  auto at = place_of(id);
  while (entries_[at].used) at = next(at);
  entries_[at] = {id, number, true};
  return entries_[at].number;
}

void IdMap::grow() {
  std::vector<Entry> old(2 * entries_.size());
  old.swap(entries_);
  --shift_;
  for (const auto& entry : old) {
    if (entry.used) place(entry.id, entry.number);
  }
}

// Entries after the gap move up unless they then lie before their own place (Knuth, TAOCP 6.4, algorithm R).
void IdMap::erase(std::int64_t id) {
  auto gap = place_of(id);
  while (entries_[gap].used && entries_[gap].id != id) gap = next(gap);
  if (!entries_[gap].used) return;
  for (auto at = next(gap); entries_[at].used; at = next(at)) {
    const auto mask = entries_.size() - 1;
    const auto from_own_place = (at - place_of(entries_[at].id)) & mask;
    const auto from_gap = (at - gap) & mask;
    if (from_own_place < from_gap) continue;
    entries_[gap] = entries_[at];
    gap = at;
  }
  entries_[gap].used = false;
  --size_;
}

}  // namespace lockstep::parameter_server

namespace lockstep {

RowInitializer::RowInitializer(const char* name) {
  const std::string given = name;
  if (given == "uniform") return;
  if (given == "normal") {
    kind = Kind::normal;
  } else if (given == "zeros" || given == "ones") {
    kind = Kind::constant;
    scale = given == "ones" ? 1 : 0;
  } else {
    throw InvalidArgument(text("the initializer of rows is \"", given,
                               "\"; by name there are \"uniform\", \"normal\", \"zeros\" and \"ones\""));
  }
}

RowInitializer::RowInitializer(Kind of, double given) : kind(of), scale(given) {
  if (std::isfinite(scale) && (scale > 0 || kind == Kind::constant)) return;
  throw InvalidArgument(text("the initializer of rows has the scale ", scale, "; it must be finite and above 0"));
}

namespace parameter_server {
void check(const TableSpec& table) {
  const auto fail = [&](const char* what, std::int64_t value, const char* allowed) {
    throw InvalidArgument(text("the table \"", table.name, "\" has ", what, " ", value, "; it must be ", allowed));
  };
  if (table.rows < 1) fail("a number of rows of", table.rows, "1 or more");
  if (table.width < 1 || table.width > 65'536) fail("rows of a width of", table.width, "from 1 to 65536");
  if (table.admit_after < 0) fail("admit_after", table.admit_after, "0 or more");
  if (table.evict_after < 0) fail("evict_after", table.evict_after, "0 or more");
}

void check_ids(const TableSpec& table, std::span<const std::int64_t> ids) {
  for (const auto id : ids) {
    if (id >= 0 && id < table.rows) continue;
    throw InvalidArgument(text("id ", id, " is out of range for the table \"", table.name, "\": it has ", table.rows,
                               " rows, so ids are from 0 to ", table.rows - 1));
  }
}

int server_of_row(std::int64_t id, int servers) {
  return static_cast<int>(mix(static_cast<std::uint64_t>(id)) % static_cast<std::uint64_t>(servers));
}

void write_initial_values(const TableSpec& table, std::int64_t id, std::byte* values) {
  auto state = mix(table.seed, id);
  // Numbers in [0, 1), with the 53 bits of a double.
  const auto uniform = [&state] { return static_cast<double>(mix(state++) >> 11) * 0x1p-53; };
  // Box and Muller (1958).
  const auto normal = [&uniform] {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  };
  const double scale = table.initializer.scale;
  with_element(table.dtype, [&]<class T>(T) {
    auto* const row = reinterpret_cast<T*>(values);
    for (std::int64_t i = 0; i < table.width; ++i) {
      switch (table.initializer.kind) {
        case RowInitializer::Kind::uniform: row[i] = static_cast<T>((2 * uniform() - 1) * scale); break;
        case RowInitializer::Kind::normal: row[i] = static_cast<T>(normal() * scale); break;
        case RowInitializer::Kind::constant: row[i] = static_cast<T>(scale); break;
      }
    }
  });
}

std::vector<std::size_t> ends_of_servers(std::span<const std::int64_t> ids, int servers) {
  std::vector<std::size_t> ends(static_cast<std::size_t>(servers));
  std::size_t last = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto server = servers == 1 ? 0 : static_cast<std::size_t>(server_of_row(ids[i], servers));
    if (server < last) throw Error("rows of a table are not in the order of the servers");
    for (; last < server; ++last) ends[last] = i;
  }
  for (; last < ends.size(); ++last) ends[last] = ids.size();
  return ends;
}

SumOfRows::SumOfRows(const TableSpec& table, std::span<const Rows> parts, int servers) {
  std::vector<std::vector<std::size_t>> ends;
  for (const auto& part : parts) ends.push_back(ends_of_servers(part.ids, servers));
  for (std::size_t server = 0; server < static_cast<std::size_t>(servers); ++server) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      add(table, parts[i], server == 0 ? 0 : ends[i][server - 1], ends[i][server]);
    }
  }
}

void SumOfRows::add(const TableSpec& table, const Rows& part, std::size_t begin, std::size_t end) {
  const auto row = table.row_bytes();
  for (std::size_t i = begin; i < end; ++i) {
    const auto* const from = part.values + i * row;
    const auto place = places_.insert(part.ids[i], static_cast<std::uint32_t>(ids_.size()));
    if (place == ids_.size()) {
      ids_.push_back(part.ids[i]);
      values_.insert(values_.end(), from, from + row);
    } else {
      with_element(table.dtype, [&, width = table.width]<class T>(T) {
        const auto* const source = reinterpret_cast<const T*>(from);
        auto* const target = reinterpret_cast<T*>(values_.data() + place * row);
        for (std::int64_t k = 0; k < width; ++k) target[k] += source[k];
      });
    }
  }
}

}  // namespace parameter_server

}  // namespace lockstep

namespace lockstep::parameter_server {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// On the boundary of a huge page, and in huge pages where the system has them: rows are read in no order. (malloc would
// keep the pages before the boundary.)
Memory chunk_of(std::size_t bytes) {
  const auto whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const mapped = ::mmap(nullptr, whole + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const first = static_cast<std::byte*>(mapped);
  const auto before = (kHugePage - reinterpret_cast<std::uintptr_t>(first) % kHugePage) % kHugePage;
  auto* const memory = first + before;
  if (before > 0) ::munmap(first, before);
  if (before < kHugePage) ::munmap(memory + whole, kHugePage - before);
  ::madvise(memory, whole, MADV_HUGEPAGE);  // advice: it may fail
  return {memory, [whole](std::byte* data) { ::munmap(data, whole); }};
}

}  // namespace

RowRecords::RowRecords(std::size_t row_bytes, std::size_t states)
    : record_bytes_((sizeof(std::int64_t) + row_bytes * (1 + states) + 7) / 8 * 8),
      per_chunk_(std::max<std::size_t>(1, kHugePage / record_bytes_)) {}

RowRecords::Record RowRecords::find(std::int64_t id) const {
  const auto* const slot = map_.find(id);
  return slot == nullptr ? Record() : at(*slot);
}

void RowRecords::find(std::span<const std::int64_t> ids, std::vector<Record>& records) const {
  for (const auto id : ids) map_.prefetch(id);
  records.clear();
  for (const auto id : ids) {
    const auto record = find(id);
    if (record) {
      for (std::size_t byte = 0; byte < record_bytes_; byte += 64) __builtin_prefetch(record.begin() + byte);
    }
    records.push_back(record);
  }
}

RowRecords::Record RowRecords::make(std::int64_t id) {
  std::uint32_t slot = 0;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
    ids_[slot] = id;
  } else {
    if (ids_.size() == std::numeric_limits<std::uint32_t>::max()) {
      throw Error(text("a server has ", ids_.size(), " rows of a table, which is the most; use more servers"));
    }
    slot = static_cast<std::uint32_t>(ids_.size());
    if (slot / per_chunk_ == chunks_.size()) chunks_.push_back(chunk_of(per_chunk_ * record_bytes_));
    ids_.push_back(id);
  }
  map_.insert(id, slot);
  return at(slot);
}

void RowRecords::erase(std::int64_t id) {
  const auto* const found = map_.find(id);
  if (found == nullptr) return;
  const auto slot = *found;
  map_.erase(id);
  ids_[slot] = -1;
  free_.push_back(slot);
}

}  // namespace lockstep::parameter_server
