#include "train/tracker.h"

#include <algorithm>

#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

constexpr std::size_t kLossSums = 3;  // sums of the loss, of its divisors, and of examples

}  // namespace

Tracker::Tracker(const CompileOptions& compiled, int replicas, Communicator workers)
    : workers_(std::move(workers)),
      divide_(compiled.loss.reduction() != Reduction::sum),
      metrics_(compiled.metrics),
      first_weighted_(compiled.metrics.size()) {
  metrics_.insert(metrics_.end(), compiled.weighted_metrics.begin(), compiled.weighted_metrics.end());
  states_.resize(static_cast<std::size_t>(replicas));
  for (auto& states : states_) {
    for (const auto& metric : metrics_) states.emplace_back(metric);
  }
  sums_ = counted_ = local_sums();
}

void Tracker::update(int replica, const Example& part, const Tensor& outputs) {
  auto& states = states_[static_cast<std::size_t>(replica)];
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i].update(part.y, outputs, i < first_weighted_ ? Tensor() : part.weight);
  }
}

std::vector<double> Tracker::sum_batch(const PerReplica<StepResult>* results, std::span<const double> news) const {
  auto sums = sums_of(results == nullptr ? PerReplica<StepResult>(std::vector<StepResult>()) : *results);
  sums.insert(sums.end(), news.begin(), news.end());
  workers_.sum(sums);
  return sums;
}

void Tracker::count_batch(std::span<const double> sums) {
  std::copy_n(sums.begin() + kLossSums, sums_.size(), sums_.begin());
  counted_ = local_sums();
  add_loss(sums[0], sums[1], sums[2]);
}

void Tracker::take_over(int rank, bool counts) {
  auto mine = local_sums();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i] = (rank == 0 ? sums_[i] : 0) + (counts ? mine[i] - counted_[i] : 0);
  }
  for (auto& states : states_) {
    for (auto& state : states) state.reset();
  }
  auto at = mine.begin();
  for (auto& state : states_[0]) {
    for (double& sum : state.sums()) sum = *at++;
  }
  counted_ = local_sums();
}

std::vector<double> Tracker::sums_of(const PerReplica<StepResult>& results) const {
  std::vector<double> sums(kLossSums);
  for (const auto& result : results) {
    sums[0] += result.loss_sum;
    sums[1] += result.divisor;
    sums[2] += static_cast<double>(result.examples);
  }
  const auto of_metrics = local_sums();
  sums.insert(sums.end(), of_metrics.begin(), of_metrics.end());
  return sums;
}

void Tracker::add_sums(std::span<const double> sums) {
  if (sums.size() != kLossSums + sums_.size()) {
    throw InvalidArgument(text("a worker reported ", sums.size(), " sums of a step, and this model's metrics have ",
                               kLossSums + sums_.size(), "; do the processes compile it with the same metrics?"));
  }
  for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] += sums[kLossSums + i];
  add_loss(sums[0], sums[1], sums[2]);
}

void Tracker::add_loss(double loss, double divisor, double examples) {
  if (!divide_) divisor = 1;
  batch_loss_ = divisor == 0 ? 0 : loss / divisor;
  loss_sum_ += batch_loss_ * examples;
  examples_ += examples;
}

void Tracker::reset() {
  loss_sum_ = examples_ = 0;
  for (auto& states : states_) {
    for (auto& state : states) state.reset();
  }
  std::fill(sums_.begin(), sums_.end(), 0.0);
  counted_ = local_sums();
}

Logs Tracker::logs() const {
  Logs logs;
  logs.set("loss", examples_ == 0 ? 0 : loss_sum_ / examples_);
  auto at = sums_.begin();
  for (const auto& metric : metrics_) {
    const auto end = at + static_cast<std::ptrdiff_t>(metric.function().state_size());
    logs.set(metric.name(), metric.function().result({at, end}));
    at = end;
  }
  return logs;
}

std::vector<double> Tracker::local_sums() const {
  std::vector<double> all;
  for (std::size_t i = 0; i < metrics_.size(); ++i) {
    MetricState merged(metrics_[i]);
    for (const auto& states : states_) merged.merge(states[i]);
    all.insert(all.end(), merged.sums().begin(), merged.sums().end());
  }
  return all;
}

void Tracker::save(Archive& archive, const std::string& prefix) const {
  archive.set_numbers(prefix + "/loss", {loss_sum_, examples_});
  archive.set_numbers(prefix + "/metrics", sums_);
}

void Tracker::save_replicas(Archive& archive, const std::string& prefix) const {
  Archive mine;
  for (std::size_t replica = 0; replica < states_.size(); ++replica) {
    std::vector<double> sums;
    for (const auto& state : states_[replica]) sums.insert(sums.end(), state.sums().begin(), state.sums().end());
    mine.set_numbers(std::to_string(replica), sums);
  }
  int number = 0;
  for (const auto& packed : workers_.all_gather(checkpoint::print_archive(mine))) {
    const auto theirs = checkpoint::parse_archive("a worker's metrics", std::as_bytes(std::span(packed)));
    for (std::size_t replica = 0; replica < states_.size(); ++replica) {
      archive.entries[text(prefix, "/metrics/replica ", number++)] = theirs.entry(std::to_string(replica));
    }
  }
}

std::function<void()> Tracker::load(const Archive& archive, const std::string& prefix) {
  const auto loss = archive.numbers(prefix + "/loss"), all = archive.numbers(prefix + "/metrics");
  std::vector<std::vector<double>> saved;  // [replica of all workers]
  const auto name = [&](std::size_t replica) { return text(prefix, "/metrics/replica ", replica); };
  while (archive.entries.contains(name(saved.size()))) saved.push_back(archive.numbers(name(saved.size())));
  const bool fits = std::all_of(saved.begin(), saved.end(), [&](const auto& s) { return s.size() == sums_.size(); });
  if (loss.size() != 2 || all.size() != sums_.size() || !fits) {
    throw InvalidArgument("the checkpoint was made with other metrics; compile the model with the same ones");
  }
  const auto first = states_.size() * static_cast<std::size_t>(workers_.rank());
  const bool same = saved.size() == states_.size() * static_cast<std::size_t>(workers_.size());
  return [this, loss, saved, all, first, same] {
    reset();
    loss_sum_ = loss[0];
    examples_ = loss[1];
    sums_ = all;
    for (std::size_t replica = 0; replica < states_.size(); ++replica) {
      // The file has another number of replicas: the first replica goes on with the sums of all.
      if (!same && first + replica > 0) break;
      auto at = same ? saved[first + replica].begin() : all.begin();
      for (auto& state : states_[replica]) {
        for (double& sum : state.sums()) sum = *at++;
      }
    }
    counted_ = local_sums();
  };
}

}  // namespace lockstep::train
