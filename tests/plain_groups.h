// For tests: DiLoCo by its formula, in a plain loop over the models of groups of workers that train apart.
#pragma once

#include <lockstep/lockstep.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fresh_folder_testing.h"
#include "tests/workers.h"

namespace lockstep {

constexpr std::int64_t kBatchOfAll = 8, kExamplesOfAll = 25;  // the last batch of an epoch has 1

inline Dataset examples_of_all() {
  auto generator = at::detail::createCPUGenerator(4);
  const auto x = at::randn({kExamplesOfAll, 6}, generator, at::kDouble);
  const auto y = at::randint(3, {kExamplesOfAll}, generator, at::kLong);
  return Dataset::from_tensor_slices(x, y).batch(kBatchOfAll);
}

inline Optimizer adam_of_groups() { return Adam({.learning_rate = 0.02, .epsilon = 1e-3}); }

inline std::string saved_initial(const std::string& suite) {
  const auto path = (fresh_folder(suite, "initial") / "weights").string();
  const OneDeviceStrategy strategy("cpu:0", 1);
  const auto scope = strategy.scope();
  make_model(at::kDouble, adam_of_groups()).save_weights(path);
  return path;
}

class PlainGroups {
 public:
  PlainGroups(int groups, int workers, const DiLoCoOptions& options, const std::string& initial,
              const Optimizer& optimizer = adam_of_groups())
      : of_group_(workers / groups), options_(options), optimizer_(optimizer) {
    const auto scope = strategy_.scope();
    for (int group = 0; group < groups; ++group) {
      models_.push_back(make_model(at::kDouble, optimizer_));
      models_.back().load_weights(initial);
    }
    is_apart_.assign(models_.size(), false);
    anchors_ = weights_of(models_[0]);
    for (const auto& anchor : anchors_) velocities_.push_back(at::zeros_like(anchor));
  }

  // `after_step(number)`: called after each step of the groups, and before a meeting.
  void train_epoch(const std::function<void(int number)>& after_step = [](int) {}) {
    auto batches = examples_of_all().iterate();
    while (const auto batch = batches.next()) {
      const auto groups = static_cast<int>(models_.size()), workers = groups * of_group_;
      for (int group = 0; group < groups; ++group) {
        const auto begin = first_row(batch->x.size(0), group * of_group_, workers);
        const auto end = first_row(batch->x.size(0), (group + 1) * of_group_, workers);
        if (left_out_.contains({number_, group})) continue;
        is_apart_[static_cast<std::size_t>(group)] = true;
        if (begin == end) continue;
        models_[static_cast<std::size_t>(group)].train_on_batch(
            {batch->x.slice(0, begin, end), batch->y.slice(0, begin, end)});
      }
      ++steps_;
      after_step(number_++);
      if (steps_ % options_.steps == 0) meet();
    }
    meet();
    steps_ = 0;
  }

  // The mean is over those that have made steps since they met. A parameter that none of them has changed stays.
  void meet() {
    const at::NoGradGuard no_grad;
    const auto apart = std::count(is_apart_.begin(), is_apart_.end(), true);
    for (std::size_t i = 0; i < anchors_.size(); ++i) {
      auto delta = at::zeros_like(anchors_[i]);
      for (std::size_t group = 0; group < models_.size(); ++group) {
        if (is_apart_[group]) delta += (anchors_[i] - weights_of(models_[group])[i]) / static_cast<double>(apart);
      }
      if (!delta.any().item<bool>()) continue;
      velocities_[i] = options_.momentum * velocities_[i] + delta;
      anchors_[i] = anchors_[i] - options_.learning_rate * (delta + options_.momentum * velocities_[i]);
      for (const auto& model : models_) unwrap(model.module()).assign(i, anchors_[i]);
    }
    is_apart_.assign(models_.size(), false);
  }

  void lose(int group) {
    models_.erase(models_.begin() + group);
    is_apart_.erase(is_apart_.begin() + group);
  }

  // The group makes no step of this number.
  void leave_out(int number, int group) { left_out_.insert({number, group}); }

  // One group more, with the first one's optimizer. Requires that all have met.
  void add() {
    const auto path = (fresh_folder("plain_groups", "added") / "model").string();
    models_[0].save_checkpoint(path);
    const auto scope = strategy_.scope();
    models_.push_back(make_model(at::kDouble, optimizer_));
    models_.back().load_checkpoint(path);
    is_apart_.push_back(false);
  }

  const std::vector<Tensor>& values() const { return anchors_; }

 private:
  // The first of a worker's rows, of `rows` that `workers` divide: the first ones get one more.
  static std::int64_t first_row(std::int64_t rows, int worker, int workers) {
    return rows / workers * worker + std::min<std::int64_t>(worker, rows % workers);
  }

  const OneDeviceStrategy strategy_{"cpu:0", 1};
  const int of_group_;
  const DiLoCoOptions options_;
  const Optimizer optimizer_;
  std::vector<Sequential> models_;
  std::vector<Tensor> anchors_, velocities_;
  std::int64_t steps_ = 0;  // of this epoch
  int number_ = 0;          // steps in all
  std::vector<bool> is_apart_;
  std::set<std::pair<int, int>> left_out_;
};

}  // namespace lockstep
