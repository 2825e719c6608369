#include "parallel/known_shards.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace lockstep::parallel {
namespace {

struct Known {
  Communicator ranks;
  std::shared_ptr<const PartialParameter> of;
};

struct Table {
  Mutex mutex;
  std::unordered_map<const at::TensorImpl*, Known> shards LOCKSTEP_GUARDED_BY(mutex);
};

// Never destroyed: an object of static storage may end later.
Table& table() {
  static auto* const all = new Table;
  return *all;
}

std::optional<Known> known(const Tensor& tensor) {
  auto& all = table();
  const MutexLock lock(all.mutex);
  const auto found = all.shards.find(tensor.unsafeGetTensorImpl());
  return found == all.shards.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

void know_shard(const Tensor& shard, const Communicator& ranks, std::shared_ptr<const PartialParameter> of) {
  auto& all = table();
  const MutexLock lock(all.mutex);
  all.shards.insert_or_assign(shard.unsafeGetTensorImpl(), Known{ranks, std::move(of)});
}

void forget_shard(const Tensor& shard) {
  auto& all = table();
  const MutexLock lock(all.mutex);
  all.shards.erase(shard.unsafeGetTensorImpl());
}

bool any_is_shard(const std::vector<Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return known(tensor).has_value(); });
}

bool any_is_shard_of(const std::vector<Tensor>& tensors, const Communicator& ranks) {
  const auto group = ranks.group().shared_backend();
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
    const auto shard = known(tensor);
    return shard && shard->ranks.group().shared_backend() == group;
  });
}

std::shared_ptr<const PartialParameter> partial_of_shard(const Tensor& tensor) {
  const auto shard = known(tensor);
  return shard ? shard->of : nullptr;
}

}  // namespace lockstep::parallel
