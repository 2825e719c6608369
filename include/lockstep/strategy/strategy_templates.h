// The templates of Strategy. Included by strategy.h.
#pragma once

#include <optional>
#include <tuple>

#include "lockstep/strategy/module_factory.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

namespace internal {

// Returns the replica's element of a value with one a replica; any other value as it is.
template <class T>
T& on_replica(T& value, int) {
  return value;
}
template <class T>
T& on_replica(PerReplica<T>& value, int replica) {
  return value[replica];
}
template <class T>
const T& on_replica(const PerReplica<T>& value, int replica) {
  return value[replica];
}
template <class Holder>
Holder& on_replica(Mirrored<Holder>& value, int replica) {
  return value.of_replica(replica);
}

// Throws InvalidArgument when a value has another number of elements than there are replicas.
void check_elements(int elements, int replicas);

template <class T>
void check_argument(const T&, int) {}
template <class T>
void check_argument(const PerReplica<T>& value, int replicas) {
  check_elements(value.size(), replicas);
}
template <class Holder>
void check_argument(const Mirrored<Holder>& value, int replicas) {
  check_elements(value.size(), replicas);
}

// Calls `make` once a replica, all with the same random numbers, and binds the modules' parameters to the strategy.
std::shared_ptr<ReplicatedParameters> replicate_modules(StrategyImpl& strategy, const MakeModule& make);

}  // namespace internal

template <class Function, class... Args>
auto Strategy::run(Function&& function, Args&&... args) const {
  (internal::check_argument(args, num_local_replicas()), ...);
  using Result = std::invoke_result_t<Function&, ReplicaContext&, decltype(internal::on_replica(args, 0))...>;
  if (runs_programs()) return run_traced<Result>(function, args...);
  if constexpr (std::is_void_v<Result>) {
    run_on_replicas(
        [&](ReplicaContext& replica) { function(replica, internal::on_replica(args, replica.local_replica_id())...); });
  } else {
    std::vector<std::optional<Result>> results(static_cast<std::size_t>(num_local_replicas()));
    run_on_replicas([&](ReplicaContext& replica) {
      results[static_cast<std::size_t>(replica.local_replica_id())].emplace(
          function(replica, internal::on_replica(args, replica.local_replica_id())...));
    });
    std::vector<Result> values;
    values.reserve(results.size());
    for (auto& result : results) values.push_back(*std::move(result));
    return PerReplica<Result>(std::move(values));
  }
}

template <class Result, class Function, class... Args>
auto Strategy::run_traced(Function& function, Args&... args) const {
  internal::StepToRun step{.programs = internal::programs_of(function)};
  for (int replica = 0; replica < num_local_replicas(); ++replica) {
    auto& inputs = step.inputs.emplace_back();
    (internal::add_inputs(args, replica, inputs), ...);
  }
  if (step.programs != nullptr) (internal::add_key(args, step.key), ...);
  step.function = [&](ReplicaContext& replica, const std::vector<Tensor>& traced) {
    const Tensor* next = traced.data();
    // In braces, so that they are made in their order.
    std::tuple<decltype(internal::traced_argument(args, next))...> own{internal::traced_argument(args, next)...};
    std::vector<Tensor> results;
    std::apply(
        [&](auto&... each) {
          if constexpr (std::is_void_v<Result>)
            function(replica, each...);
          else if constexpr (internal::OfTensors<Result>::value)
            internal::OfTensors<Result>::add(function(replica, each...), results);
          else
            internal::refuse_result_of_step();
        },
        own);
    return results;
  };
  const auto results = run_program(step);
  if constexpr (!std::is_void_v<Result>) {
    std::vector<Result> values;
    if constexpr (internal::OfTensors<Result>::value) {
      for (const auto& of_replica : results) {
        const Tensor* next = of_replica.data();
        values.push_back(internal::OfTensors<Result>::take(next));
      }
    }
    return PerReplica<Result>(std::move(values));
  }
}

template <class Factory>
auto Strategy::replicate(const Factory& factory) const {
  if constexpr (internal::makes_modules<Factory>()) {
    using Holder = std::invoke_result_t<Factory&>;
    std::vector<Holder> replicas;
    auto make = factory;  // a mutable lambda changes itself
    auto parameters = internal::replicate_modules(*impl_, [&] {
      replicas.push_back(make());
      return internal::module_of(replicas.back());
    });
    return Mirrored<Holder>(std::move(parameters), std::move(replicas));
  }
}

}  // namespace lockstep
