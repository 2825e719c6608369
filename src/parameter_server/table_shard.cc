#include "parameter_server/table_shard.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "optimizer/flat_update.h"
#include "parameter_server/shard.h"

namespace lockstep::parameter_server {
namespace {

constexpr std::size_t kBlock = 256;                          // rows that are looked up together
constexpr std::size_t kBytesPerLock = std::size_t{1} << 20;  // of rows that a checkpoint reads while others wait

std::vector<double> initial_values_of(const Optimizer& optimizer) {
  std::vector<double> values;
  for (const auto& spec : optimizer.rule().states()) values.push_back(spec.initial_value);
  return values;
}

// The arrays of several rows, one after the other as the update's kernels take them: values, then each state.
template <class T>
class Packed {
 public:
  Packed(std::size_t rows, std::size_t width, std::size_t states)
      : row_(width), array_(rows * width), data_((1 + states) * array_) {}

  void load(const std::byte* record) {
    for (std::size_t at = rows_ * row_; at < data_.size(); at += array_, record += row_ * sizeof(T)) {
      std::memcpy(data_.data() + at, record, row_ * sizeof(T));
    }
    ++rows_;
  }
  void store(std::size_t row, std::byte* record) const {
    for (std::size_t at = row * row_; at < data_.size(); at += array_, record += row_ * sizeof(T)) {
      std::memcpy(record, data_.data() + at, row_ * sizeof(T));
    }
  }

  std::size_t count() const { return rows_ * row_; }  // elements of an array that are used
  T* array(std::size_t index) { return data_.data() + index * array_; }

 private:
  const std::size_t row_, array_;
  std::size_t rows_ = 0;
  std::vector<T> data_;
};

}  // namespace

TableShard::TableShard(TableSpec table, Optimizer optimizer)
    : table_(std::move(table)),
      optimizer_(std::move(optimizer)),
      initial_state_(initial_values_of(optimizer_)),
      live_(empty()) {
  parameter_server::check(table_);
  require_shardable(optimizer_);
}

void TableShard::read(std::span<const std::int64_t> ids, std::byte* values) const {
  check_ids(table_, ids);
  const auto row = table_.row_bytes();
  std::vector<Record> found;
  for (std::size_t begin = 0; begin < ids.size(); begin += kBlock) {
    const auto block = ids.subspan(begin, std::min(kBlock, ids.size() - begin));
    MutexLock lock(mutex_);
    live_.records.find(block, found);
    for (std::size_t i = 0; i < block.size(); ++i, values += row) {
      if (found[i]) {
        std::memcpy(values, found[i].data(), row);
      } else {
        write_initial_values(table_, block[i], values);
      }
    }
  }
}

bool TableShard::apply(std::int64_t step, const Rows& gradients, double divide_by,
                       std::optional<double> learning_rate) {
  check_ids(table_, gradients.ids);
  MutexLock lock(mutex_);
  if (live_.applied.contains(step)) return false;
  update_live(gradients, next_update(optimizer_, live_.applied.count(), learning_rate), divide_by);
  live_.applied.add(step);
  if (cut_ && step < cut_->end) {
    auto& applied = cut_->changed.applied;
    update_cut(gradients, next_update(optimizer_, applied.count(), learning_rate), divide_by);
    applied.add(step);
  }
  evict();
  return true;
}

std::vector<Rows> TableShard::blocks_of(const Rows& rows) const {
  std::vector<Rows> blocks;
  for (std::size_t begin = 0; begin < rows.ids.size(); begin += kBlock) {
    blocks.push_back(
        {rows.ids.subspan(begin, std::min(kBlock, rows.ids.size() - begin)), rows.values + begin * table_.row_bytes()});
  }
  return blocks;
}

void TableShard::update_live(const Rows& gradients, const UpdateStep& step, double divide_by) {
  std::vector<Record> found;
  for (const auto& block : blocks_of(gradients)) {
    live_.records.find(block.ids, found);
    if (cut_) keep_for_cut(block.ids, found);
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i] || !admits(block.ids[i])) continue;
      found[i] = live_.records.make(block.ids[i]);
      initialize(block.ids[i], found[i]);
    }
    update(found, block.values, step, divide_by);
  }
}

// Called after update_live, by which all rows are in `changed` or absent.
void TableShard::update_cut(const Rows& gradients, const UpdateStep& step, double divide_by) {
  std::vector<Record> found;
  for (const auto& block : blocks_of(gradients)) {
    cut_->changed.records.find(block.ids, found);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto id = block.ids[i];
      if (found[i] || !live_.records.find(id)) continue;  // the second: it was not admitted
      found[i] = cut_->changed.records.make(id);
      initialize(id, found[i]);
      cut_->absent.erase(id);
      ++cut_->rows;
    }
    update(found, block.values, step, divide_by);
  }
}

void TableShard::update(std::span<const Record> records, const std::byte* gradients, const UpdateStep& step,
                        double divide_by) const {
  const auto width = static_cast<std::size_t>(table_.width);
  with_element(table_.dtype, [&]<class T>(T) {
    Packed<T> rows(records.size(), width, initial_state_.size());
    std::vector<T> sums;
    for (std::size_t i = 0; i < records.size(); ++i) {
      if (!records[i]) continue;
      rows.load(records[i].data());
      const auto* const gradient = reinterpret_cast<const T*>(gradients) + i * width;
      sums.insert(sums.end(), gradient, gradient + width);
    }
    T* const values = rows.array(0);
    std::vector<T*> state;
    for (std::size_t k = 0; k < initial_state_.size(); ++k) state.push_back(rows.array(1 + k));
    const T* const sources = sums.data();
    optimizer::reduce_and_update<T>(optimizer_, step, {divide_by, optimizer_.options().clipvalue},
                                    {{&sources, 1}, {&values, 1}, state, rows.count()});
    std::size_t row = 0;
    for (const auto& record : records) {
      if (!record) continue;
      rows.store(row++, record.data());
      record.last_update() = step.iteration;
    }
  });
}

// The values, and the state, of a row that was never updated.
void TableShard::initialize(std::int64_t id, Record record) const {
  write_initial_values(table_, id, record.data());
  with_element(table_.dtype, [&]<class T>(T) {
    auto* at = reinterpret_cast<T*>(record.data() + table_.row_bytes());
    for (const double value : initial_state_) at = std::fill_n(at, table_.width, static_cast<T>(value));
  });
  record.last_update() = 0;
}

// Counts updates of rows that have not been admitted. Rows that come too rarely are forgotten with the old counts.
bool TableShard::admits(std::int64_t id) {
  if (table_.admit_after <= 1) return true;
  const auto* const old = old_counts_.find(id);
  const auto count = ++counts_.insert(id, 0) + (old == nullptr ? 0 : *old);
  if (static_cast<std::int64_t>(count) < table_.admit_after) return false;
  counts_.erase(id);
  old_counts_.erase(id);
  return true;
}

// Looks at a part of the rows in each step, so that each is looked at four times while it grows old. Not while a
// checkpoint has them.
void TableShard::evict() {
  if (table_.evict_after == 0) return;
  const auto now = live_.applied.count();
  if (now >= next_forgetting_) {
    old_counts_ = std::exchange(counts_, {});
    next_forgetting_ = now + table_.evict_after;
  }
  const auto slots = live_.records.slots();
  if (cut_ || slots == 0) return;
  const auto steps = static_cast<std::size_t>(std::max<std::int64_t>(1, table_.evict_after / 4));
  for (std::size_t left = slots / steps + 1; left > 0; --left) {
    next_slot_ = (next_slot_ + 1) % slots;
    const auto id = live_.records.id_in(next_slot_);
    if (id >= 0 && live_.records.at(next_slot_).last_update() + table_.evict_after <= now) live_.records.erase(id);
  }
}

void TableShard::close_below(std::int64_t end) {
  MutexLock lock(mutex_);
  live_.applied.close_below(end);
}

std::size_t TableShard::size() const {
  MutexLock lock(mutex_);
  return live_.records.size();
}

std::int64_t TableShard::version() const {
  MutexLock lock(mutex_);
  return live_.applied.count();
}

void TableShard::cut(std::int64_t end) {
  MutexLock lock(mutex_);
  cut_.reset();
  cut_ = Cut{++cuts_, end, live_.records.size(), empty(), {}};
  cut_->changed.applied = live_.applied;
}

void TableShard::keep_for_cut(std::span<const std::int64_t> ids, std::span<const Record> found) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    auto& changed = cut_->changed.records;
    if (changed.find(ids[i]) || cut_->absent.find(ids[i]) != nullptr) continue;
    if (found[i]) {
      changed.make(ids[i]).copy_of(found[i], changed.record_bytes());
    } else {
      cut_->absent.insert(ids[i], 0);
    }
  }
}

std::optional<TableShard::ClosedCut> TableShard::close_cut(std::int64_t end) {
  MutexLock lock(mutex_);
  if (!cut_) return std::nullopt;
  live_.applied.close_below(end);
  cut_->end = 0;  // for no step any more
  return ClosedCut{cut_->number, cut_->rows, cut_->changed.applied.count()};
}

void TableShard::for_each(const ClosedCut& cut, const std::function<void(const StoredRow& row)>& act) const {
  std::size_t begin = 0, end = 1;
  while (begin < end) {
    MutexLock lock(mutex_);
    if (!cut_ || cut_->number != cut.number) throw Error("a checkpoint of a table was begun anew while it was written");
    end = live_.records.slots();
    const auto part = std::max<std::size_t>(1, kBytesPerLock / live_.records.record_bytes());
    for (const auto until = std::min(end, begin + part); begin < until; ++begin) {
      const auto id = live_.records.id_in(begin);
      if (id < 0 || cut_->absent.find(id) != nullptr) continue;
      const auto changed = cut_->changed.records.find(id);
      const auto record = changed ? changed : live_.records.at(begin);
      act({id, record.last_update(), record.data()});
    }
  }
}

void TableShard::end_cut(const ClosedCut& cut) {
  MutexLock lock(mutex_);
  if (cut_ && cut_->number == cut.number) cut_.reset();
}

void TableShard::clear() {
  MutexLock lock(mutex_);
  cut_.reset();
  live_ = empty();
  counts_ = old_counts_ = {};
}

void TableShard::add_row(const StoredRow& row) {
  MutexLock lock(mutex_);
  auto record = live_.records.find(row.id);
  if (!record) record = live_.records.make(row.id);
  record.last_update() = row.last_update;
  std::memcpy(record.data(), row.data, table_.row_bytes() * (1 + initial_state_.size()));
}

void TableShard::begin_at(const SavedSteps& steps) {
  MutexLock lock(mutex_);
  live_.applied = AppliedSteps::saved(steps);
}

// Rows in pieces, between which the table may be read.
void TableShard::send(StateWriter& to) const {
  std::vector<std::byte> piece;
  StateWriter buffered(
      [&](std::span<const std::byte> bytes) { piece.insert(piece.end(), bytes.begin(), bytes.end()); });
  const auto flush = [&] { to.bytes(std::exchange(piece, {})); };
  const auto& records = live_.records;
  {
    MutexLock lock(mutex_);
    buffered.number(static_cast<std::int64_t>(records.record_bytes()));
    buffered.number(records.size());
  }
  flush();
  for (std::size_t slot = 0, end = 1; slot < end; flush()) {
    MutexLock lock(mutex_);
    end = records.slots();
    for (; slot < end && piece.size() < kBytesPerLock; ++slot) {
      if (records.id_in(slot) < 0) continue;
      buffered.number(records.id_in(slot));
      buffered.bytes({records.at(slot).begin(), records.record_bytes()});
    }
  }
  {
    MutexLock lock(mutex_);
    live_.applied.send(buffered);
    for (const auto* const counts : {&counts_, &old_counts_}) {
      buffered.number(counts->size());
      counts->for_each([&](std::int64_t id, std::uint32_t count) {
        buffered.number(id);
        buffered.number(count);
      });
    }
    buffered.number(next_forgetting_);
  }
  flush();
}

void TableShard::receive(StateReader& from) {
  clear();
  MutexLock lock(mutex_);
  auto& records = live_.records;
  from.expect(static_cast<std::int64_t>(records.record_bytes()));
  for (auto left = from.number<std::size_t>(); left > 0; --left) {
    const auto record = records.make(from.number<std::int64_t>());
    from.bytes({record.begin(), records.record_bytes()});
  }
  live_.applied = AppliedSteps::received(from);
  for (auto* const counts : {&counts_, &old_counts_}) {
    for (auto left = from.number<std::size_t>(); left > 0; --left) {
      const auto id = from.number<std::int64_t>();
      counts->insert(id, from.number<std::uint32_t>());
    }
  }
  next_forgetting_ = from.number<std::int64_t>();
}

}  // namespace lockstep::parameter_server
