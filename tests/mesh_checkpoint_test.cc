// Checkpoints of models that are split over meshes: whole, exact, and for any other mesh.
#include <lockstep/lockstep.h>

#include <filesystem>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "data/stored_tensor.h"
#include "meshes.h"

namespace lockstep {
namespace {

const Adam kAdam({.learning_rate = 1e-2, .global_clipnorm = 0.5});

// Where a training takes place: a mesh, or, without axes, one device.
struct Place {
  std::string name;
  Axes axes;
  ModelParallelOptions options = {};
};

void PrintTo(const Place& place, std::ostream* out) { *out << place.name; }

void on(const Place& place, const std::function<void(Model&)>& body, bool of_layers = false) {
  if (place.axes.empty()) {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    auto model = make_transformer_model(kAdam, of_layers);
    return body(model);
  }
  auto options = place.options;
  options.plan = transformer_plan();
  on_mesh(place.axes, options, [&](const ModelParallelStrategy&) {
    auto model = make_transformer_model(kAdam, of_layers);
    body(model);
  });
}

void train(Model& model, const Dataset& data, int epochs, std::vector<AnyCallback> callbacks = {}) {
  model.fit(data, {.epochs = epochs, .verbose = 0, .callbacks = std::move(callbacks), .handle_signals = false});
}

// The results that all ranks have in the end.
class Results {
 public:
  void add(const Model& model) {
    const auto weights = whole_weights(model);  // collective
    const std::lock_guard lock(mutex_);
    weights_.insert(weights.begin(), weights.end());
  }
  const parallel::Parameters& weights() const { return weights_; }

 private:
  std::mutex mutex_;
  parallel::Parameters weights_;
};

std::string file_of(const std::string& name) { return text(testing::TempDir(), "/mesh_checkpoint_", name); }

const Place kOne{"one", {}}, kData2{"data2", {{"data", 2}}}, kTensor2{"tensor2", {{"tensor", 2}}},
    kBoth{"data2tensor2", {{"data", 2}, {"tensor", 2}}}, kTensor4{"tensor4", {{"tensor", 4}}},
    kSharded{"sharded_state", {{"data", 2}, {"tensor", 2}}, {.shard_optimizer_state = true}};

const Place kShards{"shard2", {{"shard", 2}}, {.fully_shard = kUnits}},
    kAllShards{"data2shard2tensor2", {{"data", 2}, {"shard", 2}, {"tensor", 2}}, {.fully_shard = kUnits}};

const Place kStages{"pipeline2", {{"pipeline", 2}}, {.layers_of_stages = {1, 3}}},
    kAllStages{"data2pipeline2tensor2", {{"data", 2}, {"pipeline", 2}, {"tensor", 2}}, {.layers_of_stages = {2, 2}}},
    kShardedStages{"shard2pipeline2",
                   {{"shard", 2}, {"pipeline", 2}},
                   {.fully_shard = {.units = {"1", "2"}}, .layers_of_stages = {3, 1}}};

class OtherMesh : public testing::TestWithParam<std::tuple<Place, Place>> {};

// True where the model must be one of layers, whose head is not tied.
bool has_stages(const Place& place) {
  return std::any_of(place.axes.begin(), place.axes.end(), [](const auto& axis) { return axis.name == "pipeline"; });
}

// Half of a training here and the other half there, against all of it on one device.
TEST_P(OtherMesh, GoesOn) {
  const auto& [here, there] = GetParam();
  const auto data = make_sequences();
  const auto path = file_of(here.name + "_" + there.name);
  const bool of_layers = has_stages(here) || has_stages(there);
  Results expected, result;
  on(
      kOne,
      [&](Model& model) {
        train(model, data, 4);
        expected.add(model);
      },
      of_layers);
  on(
      here,
      [&](Model& model) {
        train(model, data, 2);
        model.save_checkpoint(path);
      },
      of_layers);
  on(
      there,
      [&](Model& model) {
        model.build({kTransformer.sequence}, at::kLong);
        model.load_checkpoint(path);
        EXPECT_EQ(model.iterations(), 8);
        train(model, data, 2);
        result.add(model);
      },
      of_layers);
  ASSERT_FALSE(result.weights().empty());
  EXPECT_LT(parallel::largest_difference(result.weights(), expected.weights()), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Pairs, OtherMesh,
                         testing::Values(std::tuple(kOne, kBoth), std::tuple(kBoth, kOne), std::tuple(kTensor4, kData2),
                                         std::tuple(kData2, kTensor2), std::tuple(kSharded, kTensor2),
                                         std::tuple(kTensor2, kSharded), std::tuple(kShards, kTensor2),
                                         std::tuple(kAllShards, kOne), std::tuple(kBoth, kAllShards),
                                         std::tuple(kStages, kOne), std::tuple(kAllStages, kShards),
                                         std::tuple(kShardedStages, kAllStages), std::tuple(kTensor2, kShardedStages)));

class SameMesh : public testing::TestWithParam<Place> {};

// The bits are those without the interruption.
TEST_P(SameMesh, GoesOnWithTheSameBits) {
  const auto data = make_sequences();
  const auto path = file_of(GetParam().name);
  Results whole, resumed;
  const auto here = [](const auto& body) { on(GetParam(), body, has_stages(GetParam())); };
  here([&](Model& model) {
    train(model, data, 4);
    whole.add(model);
  });
  here([&](Model& model) {
    train(model, data, 2);
    model.save_checkpoint(path);
  });
  here([&](Model& model) {
    model.build({kTransformer.sequence}, at::kLong);
    model.load_checkpoint(path);
    train(model, data, 2);
    resumed.add(model);
  });
  for (const auto& [name, value] : whole.weights()) EXPECT_TRUE(value.equal(resumed.weights().at(name))) << name;
}

TEST_P(SameMesh, FilesAreThoseOfOneDevice) {
  const auto data = make_sequences();
  const auto save = [&](const Place& place) {
    const auto path = file_of("file_" + place.name);
    on(
        place,
        [&](Model& model) {
          train(model, data, 1);
          model.save_checkpoint(path);
          model.save_weights(path + "_weights");
        },
        has_stages(GetParam()));
    return std::pair(read_archive(path), read_archive(path + "_weights"));
  };
  const auto [ours, our_weights] = save(GetParam());
  const auto [one, one_weights] = save(kOne);
  for (const auto& [all, expected] : {std::pair(&ours, &one), std::pair(&our_weights, &one_weights)}) {
    ASSERT_EQ(all->tensors.size(), expected->tensors.size());
    for (const auto& [name, tensor] : expected->tensors) {
      ASSERT_TRUE(all->tensors.contains(name)) << name;
      EXPECT_EQ(all->tensor(name).shape, tensor.shape) << name;
      EXPECT_EQ(all->tensor(name).dtype, tensor.dtype) << name;
    }
  }
}

// Each rank calls it.
class SavesWeights : public Callback {
 public:
  explicit SavesWeights(std::string path) : path_(std::move(path)) {}
  void on_epoch_end(int epoch, const Logs&) override { model().save_weights(text(path_, epoch + 1)); }
  bool only_on_chief() const override { return false; }

 private:
  const std::string path_;
};

TEST_P(SameMesh, SavesTheWeightsOfEachEpochsEnd) {
  constexpr int kEpochs = 3;
  const auto data = make_sequences();
  const bool of_layers = has_stages(GetParam());
  std::vector<Results> expected(kEpochs);
  on(
      kOne,
      [&](Model& model) {
        for (auto& after : expected) {
          train(model, data, 1);
          after.add(model);
        }
      },
      of_layers);
  const auto path = (fresh_folder("mesh_checkpoint", GetParam().name) / "saved").string();
  on(
      GetParam(),
      [&](Model& model) {
        train(model, data, kEpochs,
              {ModelCheckpoint(path + "_full_{epoch}"),
               ModelCheckpoint(path + "_background_{epoch}", {.background = true}),
               ModelCheckpoint(path + "_weights_{epoch}", {.save_weights_only = true}),
               SavesWeights(path + "_callback_")});
      },
      of_layers);
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (const auto* const how : {"_full_", "_background_", "_weights_", "_callback_"}) {
      const auto saved = read_archive(text(path, how, epoch));
      for (const auto& [name, value] : expected[static_cast<std::size_t>(epoch - 1)].weights()) {
        const auto difference = (data::from_stored(saved.tensor(name)) - value).abs().max().item<double>();
        EXPECT_LT(difference, kTolerance) << name << how << epoch;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, SameMesh,
                         testing::Values(kTensor2, kBoth, kSharded, kShards, kAllShards, kStages, kAllStages,
                                         kShardedStages),
                         [](const auto& each) { return each.param.name; });

// The callbacks that save, in the background and not, and one that restores.
TEST(MeshCallbacks, SaveAndRestore) {
  const auto data = make_sequences();
  const auto folder = file_of("backup"), path = file_of("callback");
  std::filesystem::remove_all(folder);
  Results expected;
  on(kOne, [&](Model& model) {
    train(model, data, 4);
    expected.add(model);
  });
  for (const bool in_background : {false, true}) {
    std::filesystem::remove_all(folder);
    Results result;
    const auto callbacks = [&]() -> std::vector<AnyCallback> {
      return {BackupAndRestore(folder, {.background = in_background}),
              ModelCheckpoint(path, {.background = in_background})};
    };
    struct Stops : Callback {
      void on_epoch_end(int epoch, const Logs&) override {
        if (epoch == 1) throw Error("this training ends");
      }
      bool only_on_chief() const override { return false; }
    };
    on(kBoth, [&](Model& model) {
      auto all = callbacks();
      all.push_back(Stops());
      expect_says(message_of([&] { train(model, data, 4, all); }), "this training ends");
    });
    on(kTensor2, [&](Model& model) {
      train(model, data, 4, callbacks());
      EXPECT_EQ(model.iterations(), 16);
      result.add(model);
    });
    EXPECT_LT(parallel::largest_difference(result.weights(), expected.weights()), kTolerance);
    EXPECT_EQ(read_archive(path).tensor("0.token.weight").shape, (std::vector<std::int64_t>{48, 24}));
  }
}

TEST(MeshCheckpoints, OfAnotherModelAreRefused) {
  const auto path = file_of("other");
  on(kTensor2, [&](Model& model) {
    model.save_weights(path);
    Model other([] { return parallel::make_transformer({.layers = 2, .width = 12, .tied = true}); });
    const auto message = message_of<InvalidArgument>([&] { other.load_weights(path); });
    expect_says(message, "0.token.weight is [48, 24] in the checkpoint and [48, 12] in the model");
  });
}

}  // namespace
}  // namespace lockstep
