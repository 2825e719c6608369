// A map by the identity of tensors; and references to tensors that do not keep them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace lockstep::gradient {

class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& tensor) : weak_(tensor.getIntrusivePtr()) {}
  bool expired() const { return weak_.expired(); }
  at::Tensor lock() const { return at::Tensor(weak_.lock()); }  // undefined where it is gone

 private:
  c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> weak_;
};

// Any thread. Who adds a tensor keeps it, or a WeakTensor of it, until it is erased: else another one may get its
// address.
template <class Value>
class TensorMap {
 public:
  void set(const at::Tensor& tensor, Value value) {
    MutexLock lock(mutex_);
    values_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(value));
  }

  // Nothing for a tensor that was not added.
  std::optional<Value> find(const at::Tensor& tensor) const {
    MutexLock lock(mutex_);
    const auto found = values_.find(tensor.unsafeGetTensorImpl());
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

  void erase(const at::Tensor& tensor) {
    MutexLock lock(mutex_);
    values_.erase(tensor.unsafeGetTensorImpl());
  }

  // Erases the tensors whose value meets the condition.
  template <class Condition>
  void erase_if(const Condition& condition) {
    MutexLock lock(mutex_);
    std::erase_if(values_, [&](const auto& entry) { return condition(entry.second); });
  }

  bool empty() const {
    MutexLock lock(mutex_);
    return values_.empty();
  }

 private:
  mutable Mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Value> values_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::gradient
