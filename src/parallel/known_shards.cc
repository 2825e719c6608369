#include "parallel/known_shards.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace lockstep::parallel {
namespace {

class KnownShards {
 public:
  void add(const Tensor& shard, const Communicator& ranks, std::shared_ptr<const PartialParameter> of) {
    MutexLock lock(mutex_);
    shards_.insert_or_assign(shard.unsafeGetTensorImpl(), Known{ranks, std::move(of)});
  }
  void remove(const Tensor& shard) {
    MutexLock lock(mutex_);
    shards_.erase(shard.unsafeGetTensorImpl());
  }
  // Null for a tensor that is no shard.
  const GroupBackend* group_of(const Tensor& tensor) {
    MutexLock lock(mutex_);
    const auto found = shards_.find(tensor.unsafeGetTensorImpl());
    return found == shards_.end() ? nullptr : found->second.ranks.group().shared_backend().get();
  }
  std::shared_ptr<const PartialParameter> partial_of(const Tensor& tensor) {
    MutexLock lock(mutex_);
    const auto found = shards_.find(tensor.unsafeGetTensorImpl());
    return found == shards_.end() ? nullptr : found->second.of;
  }

 private:
  struct Known {
    Communicator ranks;
    std::shared_ptr<const PartialParameter> of;
  };
  Mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Known> shards_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Never destroyed: an object of static storage may end later.
KnownShards& known_shards() {
  static auto* const shards = new KnownShards;
  return *shards;
}

}  // namespace

void know_shard(const Tensor& shard, const Communicator& ranks, std::shared_ptr<const PartialParameter> of) {
  known_shards().add(shard, ranks, std::move(of));
}

void forget_shard(const Tensor& shard) { known_shards().remove(shard); }

bool any_is_shard(const std::vector<Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& tensor) { return known_shards().group_of(tensor) != nullptr; });
}

bool any_is_shard_of(const std::vector<Tensor>& tensors, const Communicator& ranks) {
  const auto* const group = ranks.group().shared_backend().get();
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const auto& tensor) { return known_shards().group_of(tensor) == group; });
}

std::shared_ptr<const PartialParameter> partial_of_shard(const Tensor& tensor) {
  return known_shards().partial_of(tensor);
}

}  // namespace lockstep::parallel
