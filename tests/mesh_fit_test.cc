// fit on meshes against fit on one device.
#include "meshes.h"

#include "base/expect_says_testing.h"

namespace lockstep {
namespace {

Trained train(Model model, const Dataset& data) {
  const auto history = model.fit(
      data.repeat(),
      {.epochs = 2, .verbose = 0, .validation_data = data, .steps_per_epoch = kSteps / 2, .handle_signals = false});
  return {whole_weights(model), history.history, model.predict(data).cpu()};
}

void expect_same(const Trained& one, const Trained& other) {
  for (const auto& [name, value] : one.weights) {
    const auto& expected = other.weights.contains(name) ? name : "0.token.weight";  // the head's, where they are tied
    EXPECT_LT((value - other.weights.at(expected)).abs().max().item<double>(), kTolerance) << name;
  }
  ASSERT_EQ(one.history.size(), other.history.size());
  for (const auto& [name, values] : one.history) {
    ASSERT_EQ(values.size(), other.history.at(name).size());
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(values[i], other.history.at(name)[i], kTolerance) << name;
  }
  EXPECT_LT((one.predicted - other.predicted).abs().max().item<double>(), kTolerance);
}

struct Case {
  std::string name;
  Axes axes;
  Optimizer optimizer;
  ModelParallelOptions options = {};

  bool is_tied() const { return !options.tied.empty(); }
  bool has_stages() const {
    return std::any_of(axes.begin(), axes.end(), [](const auto& axis) { return axis.name == "pipeline"; });
  }
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class MeshFit : public testing::TestWithParam<Case> {};

TEST_P(MeshFit, IsThatOfOneDevice) {
  const auto data = make_sequences();
  const auto expected = [&] {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    return train(make_transformer_model(GetParam().optimizer, GetParam().has_stages() && !GetParam().is_tied()), data);
  }();
  EXPECT_LT(expected.history.at("loss").back(), 0.9 * expected.history.at("loss").front());
  auto options = GetParam().options;
  if (options.layout_map.empty()) options.plan = transformer_plan();
  std::mutex one_at_a_time;
  on_mesh(GetParam().axes, options, [&](const ModelParallelStrategy&) {
    const auto trained = train(make_transformer_model(GetParam().optimizer, GetParam().has_stages()), data);
    const std::lock_guard lock(one_at_a_time);
    expect_same(trained, expected);
  });
}

const Adam kClipsAll({.learning_rate = 1e-2, .global_clipnorm = 0.5});
const Adam kClipsEach({.learning_rate = 1e-2, .clipnorm = 0.1});
const SGD kMomentum({.learning_rate = 0.1, .momentum = 0.9});

const std::vector<std::vector<std::string>> kTied{{"0.token.weight", "3.head.weight"}};

const LayoutMap kLayouts{{"0.token.weight", {"tensor", ""}}, {"*.qkv.weight", {"tensor", ""}},
                         {"*.qkv.bias", {"tensor"}},         {"*.down.weight", {"", "tensor"}},
                         {"3.head.weight", {"tensor", ""}},  {"0.place.weight", {"", "tensor"}}};

const ParallelPlan kPlaces{{"0.place.weight", Shard{0}}};

INSTANTIATE_TEST_SUITE_P(
    Meshes, MeshFit,
    testing::Values(
        Case{"data2", {{"data", 2}}, kClipsAll}, Case{"tensor2", {{"tensor", 2}}, kClipsAll},
        Case{"tensor4", {{"tensor", 4}}, kMomentum}, Case{"data2tensor2", {{"data", 2}, {"tensor", 2}}, kClipsAll},
        Case{"tensor2data2", {{"tensor", 2}, {"data", 2}}, kClipsEach},
        Case{"data3tensor2", {{"data", 3}, {"tensor", 2}}, kMomentum},
        Case{"data2tensor2sharded_state", {{"data", 2}, {"tensor", 2}}, kClipsAll, {.shard_optimizer_state = true}},
        Case{"shard2", {{"shard", 2}}, kClipsAll, {.fully_shard = kUnits}},
        Case{"shard4", {{"shard", 4}}, kMomentum, {.fully_shard = kUnits}},
        Case{"shard3stage2",
             {{"shard", 3}},
             kClipsEach,
             {.fully_shard = {.units = {"1", "2"}, .reshard_after_forward = false}}},
        Case{"data2shard2", {{"data", 2}, {"shard", 2}}, kClipsAll, {.fully_shard = kUnits}},
        Case{"shard2tensor2", {{"shard", 2}, {"tensor", 2}}, kClipsAll, {.fully_shard = kUnits}},
        Case{"data2shard2tensor2", {{"data", 2}, {"shard", 2}, {"tensor", 2}}, kClipsEach, {.fully_shard = kUnits}},
        Case{"pipeline2", {{"pipeline", 2}}, kClipsAll, {.layers_of_stages = {1, 3}, .tied = kTied}},
        Case{"pipeline1", {{"pipeline", 1}}, kClipsAll, {.tied = kTied}},
        Case{"pipeline2measured", {{"pipeline", 2}}, kMomentum, {.microbatches = 3, .tied = kTied}},
        Case{"pipeline4gpipe",
             {{"pipeline", 4}},
             kClipsEach,
             {.schedule = schedules::gpipe, .layers_of_stages = {1, 1, 1, 1}, .tied = kTied}},
        Case{"zero_bubble_v",
             {{"pipeline", 2}},
             kClipsAll,
             {.schedule = schedules::zero_bubble_v,
              .stages_per_rank = 2,
              .layers_of_stages = {1, 1, 1, 1},
              .tied = kTied}},
        Case{"data2pipeline2recompute",
             {{"data", 2}, {"pipeline", 2}},
             kClipsAll,
             {.layers_of_stages = {2, 2}, .tied = kTied, .recompute = true}},
        Case{"pipeline2tensor2", {{"pipeline", 2}, {"tensor", 2}}, kClipsAll, {.tied = kTied}},
        Case{"data2pipeline2tensor2",
             {{"data", 2}, {"pipeline", 2}, {"tensor", 2}},
             kMomentum,
             {.schedule = schedules::zero_bubble, .layers_of_stages = {2, 2}, .tied = kTied}},
        Case{"shard2pipeline2",
             {{"shard", 2}, {"pipeline", 2}},
             kClipsAll,
             {.fully_shard = kUnits, .layers_of_stages = {2, 2}}},
        Case{"shard2data2", {{"shard", 2}, {"data", 2}}, kClipsAll, {.fully_shard = kUnits}},
        Case{"context2", {{"context", 2}}, kClipsAll, {.context_plan = kPlaces}},
        Case{"context3", {{"context", 3}}, kMomentum, {.context_plan = kPlaces}},
        Case{"data2context2", {{"data", 2}, {"context", 2}}, kClipsEach, {.context_plan = kPlaces}},
        Case{"context2tensor2", {{"context", 2}, {"tensor", 2}}, kClipsAll, {.context_plan = kPlaces}},
        Case{"data2context2sharded_state",
             {{"data", 2}, {"context", 2}},
             kClipsAll,
             {.context_plan = kPlaces, .shard_optimizer_state = true}},
        Case{"pipeline2context2",
             {{"pipeline", 2}, {"context", 2}},
             kMomentum,
             {.layers_of_stages = {2, 2}, .tied = kTied, .context_plan = kPlaces}},
        Case{"layout_map", {{"data", 2}, {"tensor", 2}}, kClipsAll, {.layout_map = kLayouts}}),
    [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace lockstep
