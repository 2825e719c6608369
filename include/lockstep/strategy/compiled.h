// Step functions that are traced once. Follows tf.function, and jax.jit.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/replica_values.h"
#include "lockstep/strategy/replicated.h"

namespace lockstep {

class ReplicaContext;

namespace internal {

class StepPrograms;  // that were compiled of one step function

std::shared_ptr<StepPrograms> make_step_programs();

}  // namespace internal

// A step function for Strategy::run. With TPUStrategy it is called once for the shapes of its tensors, its modules and
// whether they train, and its numbers. Its work on tensors is compiled, and run from then on. Its captures are fixed at
// that call, and all else that it does is done once. Without `compiled`, run calls a function in every step, and
// compiles it anew only where it did something else. With other strategies it is the function itself. One thread at a
// time; copies share what was compiled.
template <class Function>
class Compiled {
 public:
  explicit Compiled(Function function) : function_(std::move(function)), programs_(internal::make_step_programs()) {}

  template <class... Args>
  auto operator()(Args&&... args) const -> std::invoke_result_t<const Function&, Args...> {
    return function_(std::forward<Args>(args)...);
  }

  internal::StepPrograms& programs() const { return *programs_; }

 private:
  Function function_;
  std::shared_ptr<internal::StepPrograms> programs_;
};

template <class Function>
Compiled<Function> compiled(Function function) {
  return Compiled<Function>(std::move(function));
}

namespace internal {

// All that decides, beside the shapes of tensors, whether a compiled step is the same one.
struct StepKey {
  std::vector<std::int64_t> values;
  std::vector<std::weak_ptr<const void>> alive;  // without which the program cannot run any more
};
void add_module(const ReplicatedModule& module, StepKey& key);
[[noreturn]] void refuse_argument_of_compiled();

// A step for all replicas: what it is given, [replica][tensor], of which some may be undefined; and the function that
// is traced with tensors like those of one replica.
struct StepToRun {
  std::vector<std::vector<Tensor>> inputs = {};
  StepKey key = {};
  std::function<std::vector<Tensor>(ReplicaContext& replica, const std::vector<Tensor>& traced)> function = {};
  StepPrograms* programs = nullptr;  // of the function; null: it is traced each time
};

// Values that are made of tensors: `add` puts these into a list, `take` makes a value of the next ones in it.
template <class T>
struct OfTensors {
  static constexpr bool value = false;
};

template <>
struct OfTensors<Tensor> {
  static constexpr bool value = true;
  static void add(const Tensor& tensor, std::vector<Tensor>& list) { list.push_back(tensor); }
  static Tensor take(const Tensor*& next) { return *next++; }
};

template <>
struct OfTensors<Example> {
  static constexpr bool value = true;
  static void add(const Example& example, std::vector<Tensor>& list) {
    list.insert(list.end(), {example.x, example.y, example.weight});
  }
  static Example take(const Tensor*& next) {
    Example example;
    for (Tensor* const tensor : {&example.x, &example.y, &example.weight}) *tensor = *next++;
    return example;
  }
};

template <class Tuple>
struct OfTupleOfTensors {
  static void add(const Tuple& values, std::vector<Tensor>& list) {
    std::apply([&](const auto&... each) { (OfTensors<std::decay_t<decltype(each)>>::add(each, list), ...); }, values);
  }
  static Tuple take(const Tensor*& next) {
    Tuple values;
    std::apply([&](auto&... each) { ((each = OfTensors<std::decay_t<decltype(each)>>::take(next)), ...); }, values);
    return values;
  }
};

template <class A, class B>
struct OfTensors<std::pair<A, B>> : OfTupleOfTensors<std::pair<A, B>> {
  static constexpr bool value = OfTensors<A>::value && OfTensors<B>::value;
};

template <class... T>
struct OfTensors<std::tuple<T...>> : OfTupleOfTensors<std::tuple<T...>> {
  static constexpr bool value = (OfTensors<T>::value && ...);
};

[[noreturn]] void refuse_argument_of_step();
[[noreturn]] void refuse_result_of_step();

// Adds the replica's tensors of an argument of run.
template <class T>
void add_inputs(const T& value, int /*replica*/, std::vector<Tensor>& list) {
  if constexpr (OfTensors<T>::value) OfTensors<T>::add(value, list);
}
template <class T>
void add_inputs(const PerReplica<T>& value, int replica, std::vector<Tensor>& list) {
  if constexpr (OfTensors<T>::value)
    OfTensors<T>::add(value[replica], list);
  else
    refuse_argument_of_step();
}
template <class Holder>
void add_inputs(const Mirrored<Holder>& /*value*/, int /*replica*/, std::vector<Tensor>& /*list*/) {}

// Adds what an argument of a compiled function decides.
template <class T>
void add_key(const T& value, StepKey& key) {
  if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>)
    key.values.push_back(std::bit_cast<std::int64_t>(static_cast<double>(value)));
  else if constexpr (!OfTensors<T>::value)
    refuse_argument_of_compiled();
}
template <class T>
void add_key(const PerReplica<T>& /*value*/, StepKey& /*key*/) {}
template <class Holder>
void add_key(const Mirrored<Holder>& value, StepKey& key) {
  add_module(value, key);
}

// Returns an argument as the traced function gets it: tensors of the program, or the argument itself.
template <class T>
decltype(auto) traced_argument(T& value, const Tensor*& next) {
  using Value = std::remove_const_t<T>;
  if constexpr (OfTensors<Value>::value)
    return OfTensors<Value>::take(next);
  else
    return (value);
}
template <class T>
decltype(auto) traced_argument(PerReplica<T>& value, const Tensor*& next) {
  if constexpr (OfTensors<T>::value)
    return OfTensors<T>::take(next);
  else
    return value[0];  // not reached: add_inputs has refused it
}
template <class T>
decltype(auto) traced_argument(const PerReplica<T>& value, const Tensor*& next) {
  if constexpr (OfTensors<T>::value)
    return OfTensors<T>::take(next);
  else
    return value[0];
}
template <class Holder>
Holder& traced_argument(Mirrored<Holder>& value, const Tensor*& /*next*/) {
  return value.of_replica(0);
}

template <class T>
struct IsCompiled : std::false_type {};
template <class Function>
struct IsCompiled<Compiled<Function>> : std::true_type {};

template <class T>
StepPrograms* programs_of(T& function) {
  if constexpr (IsCompiled<std::remove_const_t<T>>::value)
    return &function.programs();
  else
    return nullptr;
}

}  // namespace internal
}  // namespace lockstep
