// Checkpoints of models that are split over meshes: whole, exact, and for any other mesh.
#include <lockstep/lockstep.h>
#include <filesystem>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "meshes.h"

namespace lockstep {
namespace {

constexpr double kTolerance = 1e-9;
const Adam kAdam({.learning_rate = 1e-2, .global_clipnorm = 0.5});

// Where a training takes place: a mesh, or, without axes, one device.
struct Place {
  std::string name;
  Axes axes;
  ModelParallelOptions options = {};
};

void PrintTo(const Place& place, std::ostream* out) { *out << place.name; }

void on(const Place& place, const std::function<void(Model&)>& body) {
  if (place.axes.empty()) {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    auto model = make_transformer_model(kAdam);
    return body(model);
  }
  auto options = place.options;
  options.plan = transformer_plan();
  on_mesh(place.axes, options, [&](const ModelParallelStrategy&) {
    auto model = make_transformer_model(kAdam);
    body(model);
  });
}

void train(Model& model, const Dataset& data, int epochs, std::vector<AnyCallback> callbacks = {}) {
  model.fit(data, {.epochs = epochs, .verbose = 0, .callbacks = std::move(callbacks), .handle_signals = false});
}

// What rank 0 has in the end.
class Results {
 public:
  void add(const Model& model) {
    const auto weights = whole_weights(model);  // collective
    if (!model.strategy().is_chief()) return;
    for (const auto& [name, value] : weights) weights_[name] = value.detach().clone();
  }
  const parallel::Parameters& weights() const { return weights_; }

 private:
  parallel::Parameters weights_;
};

std::string file_of(const std::string& name) { return text(testing::TempDir(), "/mesh_checkpoint_", name); }

const Place kOne{"one", {}}, kData2{"data2", {{"data", 2}}}, kTensor2{"tensor2", {{"tensor", 2}}},
    kBoth{"data2tensor2", {{"data", 2}, {"tensor", 2}}}, kTensor4{"tensor4", {{"tensor", 4}}},
    kSharded{"sharded_state", {{"data", 2}, {"tensor", 2}}, {.shard_optimizer_state = true}};

const FullyShardOptions kUnits{.units = {"1", "2"}};
const Place kShards{"shard2", {{"shard", 2}}, {.fully_shard = kUnits}},
    kAllShards{"data2shard2tensor2", {{"data", 2}, {"shard", 2}, {"tensor", 2}}, {.fully_shard = kUnits}};

class OtherMesh : public testing::TestWithParam<std::tuple<Place, Place>> {};

// Half of a training here and the other half there, against all of it on one device.
TEST_P(OtherMesh, GoesOn) {
  const auto& [here, there] = GetParam();
  const auto data = make_sequences();
  const auto path = file_of(here.name + "_" + there.name);
  Results expected, result;
  on(kOne, [&](Model& model) {
    train(model, data, 4);
    expected.add(model);
  });
  on(here, [&](Model& model) {
    train(model, data, 2);
    model.save_checkpoint(path);
  });
  on(there, [&](Model& model) {
    model.build({kTransformer.sequence}, at::kLong);
    model.load_checkpoint(path);
    EXPECT_EQ(model.iterations(), 8);
    train(model, data, 2);
    result.add(model);
  });
  EXPECT_LT(parallel::largest_difference(result.weights(), expected.weights()), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Pairs, OtherMesh,
                         testing::Values(std::tuple(kOne, kBoth), std::tuple(kBoth, kOne), std::tuple(kTensor4, kData2),
                                         std::tuple(kData2, kTensor2), std::tuple(kSharded, kTensor2),
                                         std::tuple(kTensor2, kSharded), std::tuple(kShards, kTensor2),
                                         std::tuple(kAllShards, kOne), std::tuple(kBoth, kAllShards)));

class SameMesh : public testing::TestWithParam<Place> {};

// The same bits as without the interruption.
TEST_P(SameMesh, GoesOnWithTheSameBits) {
  const auto data = make_sequences();
  const auto path = file_of(GetParam().name);
  Results whole, resumed;
  on(GetParam(), [&](Model& model) {
    train(model, data, 4);
    whole.add(model);
  });
  on(GetParam(), [&](Model& model) {
    train(model, data, 2);
    model.save_checkpoint(path);
  });
  on(GetParam(), [&](Model& model) {
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
    on(place, [&](Model& model) {
      train(model, data, 1);
      model.save_checkpoint(path);
      model.save_weights(path + "_weights");
    });
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

INSTANTIATE_TEST_SUITE_P(Meshes, SameMesh, testing::Values(kTensor2, kBoth, kSharded, kShards, kAllShards),
                         [](const auto& each) { return each.param.name; });

// The callbacks that save, in the background and not, and one that restores.
TEST(MeshCallbacks, SaveAndRestore) {
  const auto data = make_sequences();
  const auto folder = file_of("backup"), path = file_of("callback");
  std::filesystem::remove_all(folder);
  Results expected, result;
  on(kOne, [&](Model& model) {
    train(model, data, 4);
    expected.add(model);
  });
  for (const bool in_background : {false, true}) {
    std::filesystem::remove_all(folder);
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
