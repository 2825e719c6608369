// For tests: callbacks see and save the weights of an epoch's end. The expected weights are those of a plain loop.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "data/stored_tensor.h"
#include "tests/workers.h"

namespace lockstep::epoch_end {

inline constexpr double kRate = 0.05;
inline constexpr int kEpochs = 3, kExamples = 23, kBatch = 5;

inline Tensor inputs() { return at::linspace(-1, 1, kExamples * 3, at::kDouble).sin().view({kExamples, 3}); }
inline Tensor targets() { return inputs().sum(1, true) * 2 + 1; }

// The weight and the bias of one linear layer.
using Line = std::vector<Tensor>;

inline Line line_in(const std::string& path) {
  const auto archive = read_archive(path);
  return {data::from_stored(archive.tensor("dense.weight")), data::from_stored(archive.tensor("dense.bias"))};
}

inline double loss_of(const Line& line) {
  return (at::linear(inputs(), line[0], line[1]) - targets()).square().mean().item<double>();
}

// Gradient descent as anybody writes it: [epoch], the line after it.
inline std::vector<Line> expected_lines(Line line) {
  std::vector<Line> lines;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (int begin = 0; begin < kExamples; begin += kBatch) {
      const auto x = inputs().slice(0, begin, begin + kBatch), y = targets().slice(0, begin, begin + kBatch);
      const auto error = (at::linear(x, line[0], line[1]) - y) * (2.0 / static_cast<double>(x.size(0)));
      line = {line[0] - kRate * error.t().matmul(x), line[1] - kRate * error.sum(0)};
    }
    lines.push_back(line);
  }
  return lines;
}

inline void expect_near(const Line& found, const Line& expected, const char* what, int epoch) {
  EXPECT_LT(largest_difference(found, expected), 1e-12) << what << ", epoch " << epoch + 1;
}

class Compare : public Callback {
 public:
  Compare(std::string folder, std::vector<Line> expected, Dataset data, double of_losses)
      : folder_(std::move(folder)), expected_(std::move(expected)), data_(std::move(data)), of_losses_(of_losses) {}

  void on_epoch_end(int epoch, const Logs&) override {
    const auto& expected = expected_[static_cast<std::size_t>(epoch)];
    const auto path = text(folder_, "/by_callback_", epoch);
    model().save_weights(path);  // first: nothing else has read them before
    expect_near(line_in(path), expected, "save_weights", epoch);
    expect_near(weights_of(model()), expected, "module()", epoch);
    EXPECT_NEAR(model().evaluate(data_)["loss"], loss_of(expected), of_losses_);
    const auto outputs = model().predict(data_);
    EXPECT_LT((outputs - at::linear(inputs(), expected[0], expected[1])).abs().max().item<double>(), 1e-12);
    ++calls_;
  }
  int calls() const { return calls_; }

 private:
  std::string folder_;
  std::vector<Line> expected_;
  Dataset data_;
  const double of_losses_;
  int calls_ = 0;
};

// Runs in each process of the strategy. `of_losses`: how much those of evaluate may differ.
inline void compare_epochs(const Strategy& strategy, const std::string& folder, const std::string& initial,
                           double of_losses = 1e-12) {
  const auto scope = strategy.scope();
  const auto data = Dataset::from_tensor_slices(inputs(), targets()).batch(kBatch);
  const auto expected = expected_lines(line_in(initial));
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD({.learning_rate = kRate}), .loss = "mse"});
  model.build({3}, at::kDouble);
  model.load_weights(initial);
  const auto compare = std::make_shared<Compare>(folder, expected, data, of_losses);
  model.fit(data, {.epochs = kEpochs,
                   .verbose = 0,
                   .callbacks = {ModelCheckpoint(folder + "/weights_{epoch}", {.save_weights_only = true}),
                                 ModelCheckpoint(folder + "/full_{epoch}"), compare}});
  if (strategy.is_chief()) {
    EXPECT_EQ(compare->calls(), kEpochs);
  }
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto& line = expected[static_cast<std::size_t>(epoch)];
    if (strategy.is_chief()) expect_near(line_in(text(folder, "/weights_", epoch + 1)), line, "ModelCheckpoint", epoch);
    model.load_checkpoint(text(folder, "/full_", epoch + 1));
    if (strategy.is_chief()) expect_near(weights_of(model), line, "a full checkpoint", epoch);
  }
}

inline std::string initial_line(const std::string& folder) {
  set_random_seed(3);
  Sequential model({Dense(1)});
  model.build({3}, at::kDouble);
  model.save_weights(folder + "/initial");
  return folder + "/initial";
}

}  // namespace lockstep::epoch_end
