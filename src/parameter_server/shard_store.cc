#include "parameter_server/shard_store.h"

#include <cmath>

#include "base/text.h"
#include "collective/backend.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

ShardStore::ShardStore(const ModelSpec& model, const std::vector<ShardPlace>& places, ServerNumber server,
                       const Optimizer& optimizer, const UpdateMode& mode)
    : server_(server), mode_(mode), states_(names_of_states(optimizer)), parts_(mode.needed) {
  parameter_server::check(mode);
  for (const auto& place : places) {
    if (place.server != server.index) continue;
    const auto count = static_cast<std::size_t>(place.count);
    const auto dtype = model.variables[place.variable].dtype;
    rows_.push_back(rows_of(model.variables, place));
    shards_.push_back(
        std::make_unique<Shard>(collective::private_memory(count * size_of(dtype)), count, dtype, optimizer));
  }
  for (const auto& table : model.tables) tables_.push_back(std::make_unique<TableShard>(table, optimizer));
}

const TableShard& ShardStore::table(std::size_t number) const {
  if (number < tables_.size()) return *tables_[number];
  throw InvalidArgument(text("this server has no table number ", number, "; it has ", tables_.size()));
}

void ShardStore::check(const Push& push) const {
  const auto step = push.task.step;
  const int part = push.task.part;
  const auto fail = [&](auto... what) {
    throw InvalidArgument(text("the push of step ", step, ", part ", part, ", has ", what...));
  };
  if (step < 0) fail("a step below 0");
  if (part < 0 || part >= mode_.parts) fail("a part that is not from 0 to ", mode_.parts - 1);
  if (!(push.weight >= 0) || std::isinf(push.weight)) fail("the weight ", push.weight, "; it must be 0 or more");
  if (push.gradients.size() != shards_.size()) {
    fail("gradients of ", push.gradients.size(), " shards; this server has ", shards_.size());
  }
  if (push.rows.size() != tables_.size()) {
    fail("rows of ", push.rows.size(), " tables; this server has ", tables_.size());
  }
  for (std::size_t i = 0; i < tables_.size(); ++i) check_ids(tables_[i]->table(), push.rows[i].ids);
}

void ShardStore::push(Push push) {
  check(push);
  if (push.chief < chief_) return;
  if (push.finished > 0) {
    for (const auto& shard : shards_) shard->close_below(push.finished);
    for (const auto& table : tables_) table->close_below(push.finished);
  }
  if (mode_.parts == 1) return apply({&push, 1});
  if (push.memory == nullptr) keep_gradients(push);
  MutexLock lock(mutex_);  // also while it is applied: who gets an answer may read the values of this step
  const auto step = push.task.step;
  const auto* const parts = parts_.add(std::move(push));
  if (parts == nullptr) return;
  apply(*parts);
  parts_.complete(step);
}

// Copies them, for a step that other parts complete later.
void ShardStore::keep_gradients(Push& push) const {
  struct Copies {
    std::vector<std::vector<std::byte>> elements;
    std::vector<std::vector<std::int64_t>> ids;
  };
  const auto copies = std::make_shared<Copies>();
  const auto copy = [&](const std::byte* from, std::size_t bytes) {
    return copies->elements.emplace_back(from, from + bytes).data();
  };
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (push.gradients[i] != nullptr) push.gradients[i] = copy(push.gradients[i], shards_[i]->bytes());
  }
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const auto [ids, values] = push.rows[i];
    push.rows[i].ids = copies->ids.emplace_back(ids.begin(), ids.end());
    push.rows[i].values = copy(values, ids.size() * tables_[i]->table().row_bytes());
  }
  push.memory = copies;
}

void ShardStore::apply(std::span<const Push> parts) {
  double weight = 0;
  for (const auto& part : parts) weight += part.weight;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    std::vector<const std::byte*> gradients;
    for (const auto& part : parts) {
      if (part.weight > 0 && part.gradients[i] != nullptr) gradients.push_back(part.gradients[i]);
    }
    shards_[i]->apply(parts[0].task.step, gradients, weight, parts[0].learning_rate);
  }
  for (std::size_t i = 0; i < tables_.size(); ++i) apply_to_table(i, parts, weight);
}

void ShardStore::apply_to_table(std::size_t number, std::span<const Push> parts, double weight) {
  std::vector<Rows> rows;
  for (const auto& part : parts) {
    if (part.weight > 0 && !part.rows[number].ids.empty()) rows.push_back(part.rows[number]);
  }
  auto& table = *tables_[number];
  const auto& first = parts[0];
  if (rows.size() <= 1) {
    table.apply(first.task.step, rows.empty() ? Rows() : rows[0], weight, first.learning_rate);
  } else {
    const SumOfRows sum(table.table(), rows);
    table.apply(first.task.step, sum.rows(), weight, first.learning_rate);
  }
}

void ShardStore::set_chief(std::int64_t chief) { chief_ = chief; }

void ShardStore::cut(std::int64_t end) {
  for (const auto& shard : shards_) shard->cut(end);
  for (const auto& table : tables_) table->cut(end);
}

bool ShardStore::save(std::int64_t end, const std::string& file) {
  {
    MutexLock lock(mutex_);
    parts_.complete_below(end);
  }
  Archive archive;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    auto state = shards_[i]->take_cut(end);
    if (!state) return false;
    const auto names = rows_[i].names(states_);
    archive.tensors[names[0]] = {shards_[i]->dtype(), rows_[i].shape, std::move(state->values)};
    for (std::size_t k = 0; k < states_.size(); ++k) {
      archive.tensors[names[1 + k]] = {shards_[i]->dtype(), rows_[i].shape, std::move(state->optimizer[k])};
    }
  }
  if (!tables_.empty() && !save_tables(tables_, states_, end, tables_file(file))) return false;
  write_archive(file, archive);
  return true;
}

void ShardStore::restore(checkpoint::ShardedArchive& archive, std::int64_t end, bool change) {
  std::vector<Shard::State> states;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const auto& rows = rows_[i];
    const auto read = [&](const std::string& tensor) {
      auto stored = archive.rows(tensor, rows.begin, rows.end);
      if (stored.dtype == shards_[i]->dtype() && stored.shape == rows.shape) return std::move(stored.bytes);
      throw InvalidArgument(text("the checkpoint's rows ", rows.begin, " to ", rows.end - 1, " of ", tensor, " are ",
                                 name_of(stored.dtype), " [", join(stored.shape), "]; the model's are ",
                                 name_of(shards_[i]->dtype()), " [", join(rows.shape), "]"));
    };
    const auto names = rows.tensors(states_);
    auto& state = states.emplace_back(Shard::State{.values = read(names[0])});
    for (std::size_t k = 0; k < states_.size(); ++k) state.optimizer.push_back(read(names[1 + k]));
  }
  restore_tables(tables_, states_, server_, archive, end, change);
  if (!change) return;
  for (std::size_t i = 0; i < shards_.size(); ++i) shards_[i]->restore(states[i], end);
  MutexLock lock(mutex_);
  parts_ = StepParts(mode_.needed);
  parts_.complete_below(end);
}

}  // namespace lockstep::parameter_server
