#include "train/tracker.h"

#include "lockstep/error.h"
#include "train/numbers.h"

namespace lockstep {

Tracker::Tracker(const CompileOptions& compiled, int replicas)
    : metrics_(compiled.metrics), first_weighted_(compiled.metrics.size()) {
  metrics_.insert(metrics_.end(), compiled.weighted_metrics.begin(), compiled.weighted_metrics.end());
  states_.resize(static_cast<std::size_t>(replicas));
  for (auto& states : states_) {
    for (const auto& metric : metrics_) states.emplace_back(metric);
  }
}

void Tracker::update(int replica, const Example& part, const Tensor& outputs) {
  auto& states = states_[static_cast<std::size_t>(replica)];
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i].update(part.y, outputs, i < first_weighted_ ? Tensor() : part.weight);
  }
}

void Tracker::add_loss(double loss, std::int64_t batch_size) {
  loss_sum_ += loss * static_cast<double>(batch_size);
  examples_ += static_cast<double>(batch_size);
}

void Tracker::reset() {
  loss_sum_ = examples_ = 0;
  for (auto& states : states_) {
    for (auto& state : states) state.reset();
  }
}

Logs Tracker::logs() const {
  Logs logs;
  logs.set("loss", examples_ == 0 ? 0 : loss_sum_ / examples_);
  for (std::size_t i = 0; i < metrics_.size(); ++i) {
    MetricState merged(metrics_[i]);
    for (const auto& states : states_) merged.merge(states[i]);
    logs.set(metrics_[i].name(), merged.result());
  }
  return logs;
}

std::vector<double> Tracker::merged_sums() const {
  std::vector<double> all;
  for (std::size_t i = 0; i < metrics_.size(); ++i) {
    MetricState merged(metrics_[i]);
    for (const auto& states : states_) merged.merge(states[i]);
    all.insert(all.end(), merged.sums().begin(), merged.sums().end());
  }
  return all;
}

void Tracker::save(Archive& archive, const std::string& prefix) const {
  archive.entries[prefix + "/loss"] = print_numbers({loss_sum_, examples_});
  archive.entries[prefix + "/metrics"] = print_numbers(merged_sums());
}

void Tracker::load(const Archive& archive, const std::string& prefix) {
  const auto loss = parse_numbers(archive.entry(prefix + "/loss"));
  const auto sums = parse_numbers(archive.entry(prefix + "/metrics"));
  if (loss.size() != 2 || sums.size() != merged_sums().size()) {
    throw InvalidArgument("the checkpoint was made with other metrics; compile the model with the same ones");
  }
  reset();
  loss_sum_ = loss[0];
  examples_ = loss[1];
  auto at = sums.begin();
  for (auto& state : states_[0]) {
    for (double& sum : state.sums()) sum = *at++;
  }
}

}  // namespace lockstep
