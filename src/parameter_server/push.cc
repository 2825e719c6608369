#include "parameter_server/push.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

void StateReader::expect(std::int64_t expected) {
  const auto found = number<std::int64_t>();
  if (found == expected) return;
  throw DataError(text("another server's state of a shard has ", found, " where ", expected, " is expected"));
}

void check(const UpdateMode& mode) {
  if (mode.parts < 1) throw InvalidArgument(text("a step has ", mode.parts, " parts; it must be at least 1"));
  if (mode.needed < 1 || mode.needed > mode.parts) {
    throw InvalidArgument(
        text(mode.needed, " of ", mode.parts, " parts of a step are needed; it must be from 1 to ", mode.parts));
  }
}

namespace {

struct Copies {
  std::vector<std::vector<std::byte>> elements;
  std::vector<std::vector<std::int64_t>> ids;
};

}  // namespace

void keep(Push& push, const PushSizes& sizes) {
  const auto copies = std::make_shared<Copies>();
  const auto copy = [&](const std::byte* from, std::size_t bytes) {
    return copies->elements.emplace_back(from, from + bytes).data();
  };
  for (std::size_t i = 0; i < sizes.shards.size(); ++i) {
    if (push.gradients[i] != nullptr) push.gradients[i] = copy(push.gradients[i], sizes.shards[i]);
  }
  for (std::size_t i = 0; i < sizes.rows.size(); ++i) {
    const auto [ids, values] = push.rows[i];
    push.rows[i].ids = copies->ids.emplace_back(ids.begin(), ids.end());
    push.rows[i].values = copy(values, ids.size() * sizes.rows[i]);
  }
  push.memory = copies;
}

void send(const Push& push, const PushSizes& sizes, StateWriter& to) {
  to.number(push.task.step);
  to.number(push.task.part);
  to.number(push.weight);
  to.number(push.learning_rate.has_value());
  to.number(push.learning_rate.value_or(0));
  to.number(push.chief);
  to.number(push.finished);
  for (std::size_t i = 0; i < sizes.shards.size(); ++i) {
    to.number(push.gradients[i] != nullptr);
    if (push.gradients[i] != nullptr) to.bytes({push.gradients[i], sizes.shards[i]});
  }
  for (std::size_t i = 0; i < sizes.rows.size(); ++i) {
    to.numbers(push.rows[i].ids);
    to.bytes({push.rows[i].values, push.rows[i].ids.size() * sizes.rows[i]});
  }
}

Push receive_push(const PushSizes& sizes, StateReader& from) {
  const auto copies = std::make_shared<Copies>();
  const auto read = [&](std::size_t bytes) {
    auto& elements = copies->elements.emplace_back(bytes);
    from.bytes(elements);
    return elements.data();
  };
  Push push;
  push.task.step = from.number<std::int64_t>();
  push.task.part = from.number<int>();
  push.weight = from.number<double>();
  const bool has_learning_rate = from.number<bool>();
  const auto learning_rate = from.number<double>();
  if (has_learning_rate) push.learning_rate = learning_rate;
  push.chief = from.number<std::int64_t>();
  push.finished = from.number<std::int64_t>();
  for (const auto bytes : sizes.shards) push.gradients.push_back(from.number<bool>() ? read(bytes) : nullptr);
  for (const auto row : sizes.rows) {
    const auto& ids = copies->ids.emplace_back(from.numbers());
    push.rows.push_back({ids, read(ids.size() * row)});
  }
  push.memory = copies;
  return push;
}

}  // namespace lockstep::parameter_server
