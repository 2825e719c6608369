#include "tpu/devices.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "ops/tensors.h"

namespace lockstep::tpu {
namespace {

using Buffers = std::vector<std::vector<pjrt::Buffer>>;
using Used = std::vector<std::shared_ptr<const Variable::Values>>;

// How long the other devices of a run may take to end when one has failed.
constexpr std::chrono::seconds kAfterFailure(10);

// Returns act(), whose errors then name the step.
template <class Act>
auto naming_step(const std::string& name, const Act& act) {
  try {
    return act();
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded(text(name, ": ", error.operation()), error.waited_for(), {}, pjrt::kNoAnswer);
  } catch (const DeviceError& error) {
    throw DeviceError(text(name, ": ", error.what()));
  }
}

class Launched final : public ops::LaunchedProgram {
 public:
  // used: what the run uses and makes beside its results. changed: the variables whose values it makes.
  Launched(std::string name, Buffers results, std::vector<pjrt::Event> ends, Used used,
           std::vector<std::shared_ptr<Variable>> changed)
      : name_(std::move(name)),
        results_(std::move(results)),
        ends_(std::move(ends)),
        used_(std::move(used)),
        changed_(std::move(changed)) {}

  // To free buffers of a run would wait for the end of the run, without a deadline. So buffers of a run that has not
  // ended are kept for the rest of the process.
  ~Launched() override {
    if (has_ended_ || std::all_of(ends_.begin(), ends_.end(), [](const auto& end) { return end.has_ended(); })) return;
    new std::pair<Buffers, Used>(std::move(results_), std::move(used_));
    for (const auto& variable : changed_) variable->lose();
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  std::vector<std::vector<at::Tensor>> results(Deadline deadline, const std::function<void()>& check) override {
    pjrt::Event::wait_for_all(ends_, deadline, kAfterFailure, text(name_, ": run a program"), check);
    has_ended_ = true;
    return naming_step(name_, [&] { return read(deadline); });
  }

 private:
  std::vector<std::vector<at::Tensor>> read(Deadline deadline) const {
    std::vector<std::vector<at::Tensor>> read;
    for (const auto& mine : results_) {
      auto& tensors = read.emplace_back();
      for (const auto& result : mine) {
        const auto shape = result.shape();
        tensors.push_back(at::empty(shape.sizes, ops::scalar_type_of(shape.dtype)));
        result.copy_to_host(tensors.back().mutable_data_ptr(), tensors.back().nbytes(), deadline);
      }
    }
    return read;
  }

  const std::string name_;
  Buffers results_;
  const std::vector<pjrt::Event> ends_;  // [replica]
  Used used_;
  const std::vector<std::shared_ptr<Variable>> changed_;
  bool has_ended_ = false;  // as far as `results` has seen
};

// For one step a scalar; else an array with an element a step.
at::Tensor as_argument(const std::vector<double>& numbers, at::ScalarType dtype) {
  const auto all = at::tensor(numbers, dtype);
  return numbers.size() == 1 ? all.reshape({}) : all;
}

at::Tensor as_argument(const std::vector<std::uint64_t>& seeds) {
  std::vector<std::int32_t> words;
  for (const auto seed : seeds) {
    words.push_back(static_cast<std::int32_t>(seed >> 32));
    words.push_back(static_cast<std::int32_t>(seed));
  }
  const auto all = at::tensor(words, at::kInt);
  return seeds.size() == 1 ? all : all.reshape({-1, 2});
}

// The update that each step makes, counted from 0; one that makes none has the number of the next.
std::vector<std::int64_t> numbered(const std::vector<bool>& updates) {
  std::vector<std::int64_t> numbers;
  std::int64_t next = 0;
  for (const bool updated : updates) {
    numbers.push_back(next);
    if (updated) ++next;
  }
  return numbers;
}

// A number for the `count`-th launch of the program with this hash; never 0, which stands for none.
int number_of(std::uint64_t hash, int count) {
  return static_cast<int>(mix(hash, static_cast<std::uint64_t>(count)) >> 34) + 1;
}

struct Inputs final : ops::ProgramInputs {
  Buffers buffers;  // [replica][input]
};

}  // namespace

std::unique_ptr<ops::ProgramInputs> StepProgram::copy(const std::vector<std::vector<at::Tensor>>& inputs) {
  return naming_step(name_, [&] {
    auto copied = std::make_unique<Inputs>();
    for (std::size_t replica = 0; replica < inputs.size(); ++replica) {
      auto& mine = copied->buffers.emplace_back();
      for (const auto& input : inputs[replica]) mine.push_back(replicas_.copy(input, replica));
    }
    return copied;
  });
}

std::vector<std::pair<int, pjrt::Buffer>> StepProgram::numbers(const Launch& launch, std::size_t replica) const {
  std::vector<std::pair<int, pjrt::Buffer>> copies;
  if (layout_.seed) copies.emplace_back(*layout_.seed, replicas_.copy(as_argument(launch.seeds[replica]), replica));
  const auto updates = numbered(launch.updates);
  for (const auto& number : layout_.numbers) {
    std::vector<double> values;
    for (const auto update : updates) values.push_back(number.value(update));
    copies.emplace_back(number.argument, replicas_.copy(as_argument(values, number.dtype), replica));
  }
  return copies;
}

std::unique_ptr<ops::LaunchedProgram> StepProgram::run(const std::vector<std::vector<const pjrt::Buffer*>>& arguments,
                                                       Used used_values) {
  for (const auto& used : layout_.variables)
    if (used.result >= 0) used.variable->lose();
  const int launch = replicas_.launches == nullptr ? 0 : number_of(hash_, ++*replicas_.launches);
  auto [outputs, ends] = naming_step(name_, [&] { return executable_->run(arguments, launch); });
  std::vector<std::shared_ptr<Variable>> changed;
  for (const auto& used : layout_.variables) {
    if (used.result < 0) continue;
    Variable::Values values;
    for (auto& of_replica : outputs) values.push_back(std::move(of_replica[static_cast<std::size_t>(used.result)]));
    used_values.push_back(used.variable->give(std::move(values)));
    changed.push_back(used.variable);
  }
  for (auto& of_replica : outputs) of_replica.erase(of_replica.begin() + layout_.results, of_replica.end());
  return std::make_unique<Launched>(name_, std::move(outputs), std::move(ends), std::move(used_values),
                                    std::move(changed));
}

std::unique_ptr<ops::LaunchedProgram> StepProgram::launch(Launch launch) {
  if (launch.updates.size() != static_cast<std::size_t>(steps_))
    throw Error(text("a program of ", steps_, " steps is launched with ", launch.updates.size()));
  const auto count = replicas_.devices.size();
  Buffers copies = std::move(static_cast<Inputs&>(*launch.inputs).buffers);
  std::vector<std::vector<const pjrt::Buffer*>> arguments(
      count, std::vector<const pjrt::Buffer*>(static_cast<std::size_t>(layout_.arguments)));
  for (std::size_t i = 0; i < count; ++i) {
    auto& own = copies[i];
    auto places = layout_.inputs;
    for (auto& [argument, copy] : numbers(launch, i)) {
      places.push_back(argument);
      own.push_back(std::move(copy));
    }
    for (std::size_t k = 0; k < own.size(); ++k) arguments[i][static_cast<std::size_t>(places[k])] = &own[k];
  }
  Used used_values;
  for (auto& of_replica : copies) used_values.push_back(std::make_shared<Variable::Values>(std::move(of_replica)));
  for (const auto& used : layout_.variables) {
    const auto& values = *used_values.emplace_back(used.variable->values());
    for (std::size_t i = 0; i < count; ++i) arguments[i][static_cast<std::size_t>(used.argument)] = &values[i];
  }
  auto results = run(arguments, std::move(used_values));
  for (const bool updated : launch.updates) {
    if (!updated) continue;
    for (const auto& act : layout_.after_update) act();
  }
  return results;
}

}  // namespace lockstep::tpu
