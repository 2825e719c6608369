// Values that there is one of on each replica.
#pragma once

#include <utility>
#include <vector>

namespace lockstep {

// Element i belongs to replica i; the elements may differ. A plain value, like tf.distribute's PerReplica.
template <class T>
class PerReplica {
 public:
  explicit PerReplica(std::vector<T> values) : values_(std::move(values)) {}

  int size() const { return static_cast<int>(values_.size()); }
  T& operator[](int replica) { return values_[static_cast<std::size_t>(replica)]; }
  const T& operator[](int replica) const { return values_[static_cast<std::size_t>(replica)]; }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::vector<T> values_;
};

}  // namespace lockstep
