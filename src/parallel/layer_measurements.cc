#include "parallel/layer_measurements.h"
#include "lockstep/gradient/tensor_collectives.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>

#include "base/median.h"
#include "base/text.h"
#include "lockstep/ops/memory.h"
#include "parallel/exchange.h"
#include "parallel/mesh_backend.h"

namespace lockstep::parallel {
namespace {

constexpr double kSecondsOfTrial = 0.15;  // about how long each number of examples is measured
constexpr double kFewestRounds = 1, kMostRounds = 12;
constexpr double kRate = 1e-3;                // of an optimizer whose result nobody uses
constexpr double kMostOtherBytes = 64 << 20;  // more than processors' caches have

// The seconds that the communication that was rehearsed since the last call would have taken.
double rehearsed_seconds(Rehearsal& rehearsal, MeasuredLinks& links) {
  double sum = 0;
  for (const auto& [kind, bytes] : rehearsal.take()) sum += links.collective(kind).at(bytes, rehearsal.ranks().size());
  return sum;
}

// The times of one kind of layer.
class TimedTrial {
 public:
  TimedTrial(LayerTrial& trial, const Communicator& all, const Tensor& others)
      : trial_(trial), all_(all), others_(others) {}

  // `communicated`: seconds to add, of what was rehearsed since its last call.
  LayerTimes measure(std::int64_t examples, const std::function<double()>& communicated) {
    const auto x = trial_.input(examples);
    communicated();
    const auto warm_up = run(examples, x, [&] { forward_link_ = communicated(); });
    const auto backward_link = communicated();
    double rounds =
        std::clamp(kSecondsOfTrial / (2 * (warm_up[0] + warm_up[1] + warm_up[2])), kFewestRounds, kMostRounds);
    all_.sum({&rounds, 1});
    std::array<std::array<std::vector<double>, 3>, 2> seconds;  // without gradients, and with
    for (int round = 0; round < static_cast<int>(rounds / all_.size()); ++round) {
      trial_.zero_grad();
      for (auto& pass : seconds) {
        const auto times = run(examples, x, [] {});
        for (std::size_t i = 0; i < times.size(); ++i) pass[i].push_back(times[i]);
      }
      communicated();
    }
    const auto middle = [&](std::size_t pass, std::size_t i) { return median(seconds[pass][i]); };
    std::array<double, 4> mean{(middle(0, 0) + middle(1, 0)) / 2, middle(0, 1), middle(0, 2),
                               middle(1, 1) + middle(1, 2) - middle(0, 1) - middle(0, 2)};
    all_.sum(mean);
    for (double& each : mean) each /= all_.size();
    return {mean[0] + forward_link_, mean[1] + backward_link, mean[2], std::max(mean[3], 0.0)};
  }

  // Returns the seconds of the optimizer's step. `optimizer` is null on a rank without a part of the parameters.
  double measure_update(torch::optim::Optimizer* optimizer) {
    std::vector<double> seconds;
    for (int round = 0; round < kUpdateRounds; ++round) {
      pass_others();
      seconds.push_back(seconds_of([&] {
        if (optimizer != nullptr) optimizer->step();
      }));
    }
    double mean = median(std::move(seconds));
    all_.sum({&mean, 1});
    return mean / all_.size();
  }

 private:
  static constexpr int kUpdateRounds = 5;

  // Reads and writes memory, as other layers do between two calls of this one; then all ranks go on at once.
  void pass_others() const {
    if (others_.numel() > 0) others_.add_(1);
    all_.group().barrier(all_.deadline());
  }

  std::array<double, 3> run(std::int64_t examples, const Tensor& x, const std::function<void()>& between) {
    std::array<double, 3> seconds{};
    pass_others();
    seconds[0] = seconds_of([&] { trial_.forward(x, examples); });
    between();
    trial_.reshard();
    pass_others();
    seconds[1] = seconds_of([&] { trial_.backward_input(); });
    seconds[2] = seconds_of([&] { trial_.backward_weight(); });
    return seconds;
  }

  LayerTrial& trial_;
  const Communicator& all_;
  const Tensor& others_;
  double forward_link_ = 0;
};

// Counted by one rank alone, so that threads can be ranks.
LayerBytes bytes_of(LayerTrial& trial, bool is_first_layer, std::int64_t examples) {
  LayerBytes bytes;
  trial.zero_grad();
  const auto x = trial.input(examples);
  if (!is_first_layer) bytes.input = static_cast<double>(x.nbytes());
  release_memory();
  const auto before = bytes_in_use();
  trial.forward(x, examples);
  bytes.output = static_cast<double>(trial.output().nbytes());
  bytes.activations = bytes_in_use() - before;
  trial.backward_input();
  trial.backward_weight();
  double gradients = 0;
  for (const auto& each : trial.parameters())
    gradients += each.grad().defined() ? static_cast<double>(each.nbytes()) : 0;
  // Nothing was given back since, so that what is reserved is the most that was used.
  const auto most = static_cast<double>(memory_stats().reserved_bytes) - before;
  bytes.working = std::max(0.0, most - bytes.activations - gradients);
  return bytes;
}

// Parameters and gradients of a layer that is measured; there is no optimizer yet.
double bytes_of_trial(const LayerKind& kind, const LayerDivision& division) {
  const auto own = kind.parameter_bytes + kind.trained_bytes;
  if (division.sharding == Sharding::none) return own;
  // Gathered parameters, and their gradients twice: each parameter's own, and the memory that is reduced.
  return own / division.shards + kind.parameter_bytes + 2 * kind.trained_bytes;
}

// The least of two measurements of one layer; both parts of backward come from one of the two.
LayerTimes least(const LayerTimes& a, const LayerTimes& b) {
  const auto backward = [](const LayerTimes& times) { return times.backward_input + times.backward_weight; };
  auto result = backward(b) < backward(a) ? b : a;
  result.forward = std::min(a.forward, b.forward);
  result.accumulate = std::min(a.accumulate, b.accumulate);
  return result;
}

}  // namespace

void LayerMeasurements::count(const LayerDivision& division, const std::set<std::int64_t>& examples) {
  if (!kinds_.contains(division.tensor)) kinds_[division.tensor] = find(division.tensor);
  const auto& found = kinds_.at(division.tensor);
  auto& measured = measured_[division];
  measured.profiles.resize(found.kinds.size());
  measured.examples = examples;
  for (std::size_t i = 0; i < found.kinds.size(); ++i) {
    measured.profiles[i].parameter_bytes = found.kinds[i].parameter_bytes;
    measured.profiles[i].trained_bytes = found.kinds[i].trained_bytes;
  }
  if (found.refused.empty() && division.sharding == Sharding::none) count_bytes(found, division.tensor, measured);
}

// All ranks refuse what one refuses: an error may be of one rank alone, as where memory is short. Layers have other
// values on each rank, so a layer's input differs too; but ranks of a tensor group compute with the same input.
LayerKinds LayerMeasurements::find(int tensor) const {
  auto found = find_kinds(input_, tensor);
  for (const auto& refused : links_.all().all_gather(found.refused)) {
    if (!refused.empty()) return {.refused = refused};
  }
  for (auto& kind : found.kinds) {
    kind.sample = kind.sample.clone(at::MemoryFormat::Contiguous);
    broadcast(links_.all(), {kind.sample});
  }
  return found;
}

void LayerMeasurements::count_bytes(const LayerKinds& kinds, int tensor, Measured& measured) const {
  std::vector<std::string> wanted;
  for (const auto count : measured.examples) wanted.push_back(std::to_string(count));
  links_.all().check_all_agree("plans",
                               text("kinds of layers ", kinds.kinds.size(), "\nnumbers of examples ", join(wanted)));
  std::vector<LayerBytes> counted;  // of each kind, for each number of examples
  links_.all().run_on_rank_0([&] {
    for (const auto& kind : kinds.kinds) {
      const Rehearsal group(tensor);
      LayerTrial trial(input_, kind, Sharding::none, group.ranks(), {});
      const auto own = bytes_of_trial(kind, {.tensor = tensor});
      double last = 0, of = 1;  // activations of the last count, for so many examples
      for (const auto count : measured.examples) {
        const auto expected = own + last * static_cast<double>(count) / of;
        auto& bytes = counted.emplace_back();
        if (expected > input_.options.memory_bytes) continue;
        bytes = bytes_of(trial, kind.layer == 0, count);
        last = bytes.activations;
        of = static_cast<double>(count);
      }
    }
    release_memory();
  });
  broadcast_values(counted, links_.all());
  auto next = counted.begin();
  for (auto& profile : measured.profiles) {
    for (const auto count : measured.examples) {
      const auto& bytes = *next++;
      if (bytes.output > 0) profile.bytes[count] = bytes;
    }
  }
}

void LayerMeasurements::time(const LayerDivision& division) {
  const auto& found = kinds_.at(division.tensor);
  if (!found.refused.empty()) return;
  const bool has_tensor = links_.has(division.tensor), has_all = links_.has(division.tensor * division.shards);
  Rehearsal of_tensor(division.tensor), of_data(division.shards);  // unused where the ranks do communicate
  const auto tensor = has_tensor ? links_.group(division.tensor, 1) : of_tensor.ranks();
  const auto data = has_all ? links_.group(division.shards, links_.all().size() / division.shards) : of_data.ranks();
  auto& measured = measured_.at(division);
  measured.is_computed = !has_tensor || !has_all;
  const auto communicated = [&] { return rehearsed_seconds(of_tensor, links_) + rehearsed_seconds(of_data, links_); };
  for (std::size_t i = 0; i < found.kinds.size(); ++i) time_kind(division, i, measured, communicated, tensor, data);
}

void LayerMeasurements::time_kind(const LayerDivision& division, std::size_t number, Measured& measured,
                                  const std::function<double()>& communicated, const Communicator& tensor,
                                  const Communicator& data) const {
  const auto& found = kinds_.at(division.tensor);
  const auto& kind = found.kinds[number];
  auto& profile = measured.profiles[number];
  const auto other_floats = static_cast<std::int64_t>(std::min(kMostOtherBytes, found.parameter_bytes()) / 4);
  const auto others = at::zeros({other_floats}, at::kFloat);
  LayerTrial trial(input_, kind, division.sharding, tensor, data);
  TimedTrial timed(trial, links_.all(), others);
  const auto& counted = measured_.at({.tensor = division.tensor}).profiles[number].bytes;
  for (const auto count : measured.examples) {
    const auto bytes = counted.find(count);
    if (bytes == counted.end()) continue;  // does not fit
    if (bytes_of_trial(kind, division) + bytes->second.activations > input_.options.memory_bytes) continue;
    const auto times = timed.measure(count, communicated);
    const auto [before, is_first] = profile.times.try_emplace(count, times);
    if (!is_first) before->second = least(before->second, times);
  }
  // Where the optimizer's states do not fit, the split is refused for them.
  const auto states = input_.options.optimizer_states * kind.trained_bytes;
  const bool fits =
      (kind.parameter_bytes + kind.trained_bytes + states) / division.shards <= input_.options.memory_bytes;
  // All ranks decide alike, also one without a part of the layer.
  if (!fits || profile.times.empty() || kind.trained_bytes == 0) return;
  const auto optimizer = make_optimizer(trial.parameters());
  const auto update = timed.measure_update(optimizer.get());
  profile.update_seconds = profile.update_seconds > 0 ? std::min(profile.update_seconds, update) : update;
}

// Null where there are no parameters.
std::unique_ptr<torch::optim::Optimizer> LayerMeasurements::make_optimizer(
    const std::vector<Tensor>& parameters) const {
  if (parameters.empty()) return nullptr;
  if (input_.options.optimizer) return input_.options.optimizer(parameters);
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(kRate));
}

DividedLayers LayerMeasurements::result(const LayerDivision& division) const {
  const auto& found = kinds_.at(division.tensor);
  const auto& measured = measured_.at(division);
  DividedLayers divided{.is_computed = measured.is_computed, .refused = found.refused};
  for (const auto kind : found.of_layers) divided.layers.push_back(measured.profiles[kind]);
  return divided;
}

}  // namespace lockstep::parallel
