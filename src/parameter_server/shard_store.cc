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

std::int64_t ShardStore::push(Push push) {
  check(push);
  const std::shared_lock shared(changes_);
  auto latest = chief_.load();
  while (push.chief > latest && !chief_.compare_exchange_weak(latest, push.chief)) {
  }
  if (push.chief >= latest) update(std::move(push));
  return last_transfer_;
}

void ShardStore::update(Push push) {
  if (push.finished > 0) {
    for (const auto& shard : shards_) shard->close_below(push.finished);
    for (const auto& table : tables_) table->close_below(push.finished);
  }
  if (mode_.parts == 1) return apply({&push, 1});
  if (push.memory == nullptr) keep(push, sizes());
  MutexLock lock(mutex_);  // also while it is applied: who gets an answer may read the values of this step
  const auto step = push.task.step;
  const auto* const parts = parts_.add(std::move(push));
  if (parts == nullptr) return;
  apply(*parts);
  parts_.complete(step);
}

PushSizes ShardStore::sizes() const {
  PushSizes sizes;
  for (const auto& shard : shards_) sizes.shards.push_back(shard->bytes());
  for (const auto& table : tables_) sizes.rows.push_back(table->table().row_bytes());
  return sizes;
}

void ShardStore::pull(std::span<std::byte* const> values, std::vector<std::int64_t>& versions) const {
  versions.resize(shards_.size(), Shard::kNoVersion);
  for (std::size_t i = 0; i < shards_.size(); ++i) versions[i] = shards_[i]->read(values[i], versions[i]);
}

std::int64_t ShardStore::write(std::span<const std::byte* const> values) {
  const std::shared_lock shared(changes_);
  if (values.size() != shards_.size()) {
    throw InvalidArgument(text("values of ", values.size(), " shards; this server has ", shards_.size()));
  }
  for (std::size_t i = 0; i < shards_.size(); ++i) shards_[i]->write(values[i]);
  return last_transfer_;
}

void ShardStore::send(std::int64_t transfer, StateWriter& to) {
  const std::unique_lock alone(changes_);
  if (transfer < last_transfer_) {
    throw InvalidArgument(text("transfer ", transfer, " of a server's state comes after transfer ", last_transfer_));
  }
  last_transfer_ = transfer;
  to.number(transfer);
  to.number(chief_.load());
  for (const auto& shard : shards_) shard->send(to);
  for (const auto& table : tables_) table->send(to);
  MutexLock lock(mutex_);
  parts_.send(sizes(), to);
}

void ShardStore::receive(StateReader& from) {
  const std::unique_lock alone(changes_);
  last_transfer_ = from.number<std::int64_t>();
  chief_ = from.number<std::int64_t>();
  for (const auto& shard : shards_) shard->receive(from);
  for (const auto& table : tables_) table->receive(from);
  MutexLock lock(mutex_);
  parts_.receive(sizes(), from);
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

void ShardStore::cut(std::int64_t end) {
  for (const auto& shard : shards_) shard->cut(end);
  for (const auto& table : tables_) table->cut(end);
}

std::optional<std::int64_t> ShardStore::save(std::int64_t end, const std::string& file) {
  {
    MutexLock lock(mutex_);
    parts_.complete_below(end);
  }
  std::int64_t updates = 0;
  Archive archive;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    auto state = shards_[i]->take_cut(end);
    if (!state) return std::nullopt;
    updates = std::max(updates, state->updates);
    const auto names = rows_[i].names(states_);
    archive.tensors[names[0]] = {shards_[i]->dtype(), rows_[i].shape, std::move(state->values)};
    for (std::size_t k = 0; k < states_.size(); ++k) {
      archive.tensors[names[1 + k]] = {shards_[i]->dtype(), rows_[i].shape, std::move(state->optimizer[k])};
    }
  }
  if (!tables_.empty()) {
    const auto of_tables = save_tables(tables_, states_, end, checkpoint::tables_file(file));
    if (!of_tables) return std::nullopt;
    updates = std::max(updates, *of_tables);
  }
  write_archive(file, archive);
  return updates;
}

std::int64_t ShardStore::restore(checkpoint::ShardedArchive& archive, const SavedSteps& steps,
                                 std::optional<std::int64_t> chief) {
  const std::unique_lock alone(changes_);
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
    auto& state = states.emplace_back(Shard::State{.values = read(names[0]), .updates = steps.updates});
    for (std::size_t k = 0; k < states_.size(); ++k) {
      if (!archive.has(names[1 + k])) {
        throw InvalidArgument(text("the checkpoint has no ", states_[k], " of the optimizer for ", rows.variable,
                                   ", which is trained here: it was frozen when the checkpoint was saved, or the "
                                   "optimizer was another one. To go on with that training, compile likewise; to begin "
                                   "the optimizer anew, load the weights alone, by load_weights"));
      }
      state.optimizer.push_back(read(names[1 + k]));
    }
  }
  restore_tables(tables_, states_, server_, archive, steps, chief.has_value());
  if (!chief) return last_transfer_;
  chief_ = *chief;
  for (std::size_t i = 0; i < shards_.size(); ++i) shards_[i]->restore(states[i], steps.end);
  MutexLock lock(mutex_);
  parts_ = StepParts(mode_.needed);
  parts_.complete_below(steps.end);
  return last_transfer_;
}

}  // namespace lockstep::parameter_server
