// load_weights where file and model differ, as Keras's by_name and skip_mismatch; and files of 16 bits.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/module.h>

#include <ATen/ATen.h>

#include <cstring>
#include <filesystem>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"

namespace lockstep {
namespace {

Sequential model_of(std::int64_t outputs) {
  Sequential model({Dense(3), BatchNormalization(), Dense(outputs)});
  model.build({2});
  return model;
}

std::map<std::string, Tensor> values_of(const Sequential& model) {
  std::map<std::string, Tensor> values;
  const auto module = model.module<torch::nn::Module>();
  for (const auto& named : {module->named_parameters(), module->named_buffers()}) {
    for (const auto& item : named) values[item.key()] = item.value().clone();
  }
  return values;
}

StoredTensor stored(const Tensor& tensor, DType dtype) {
  const auto plain = tensor.contiguous();
  StoredTensor result{dtype, plain.sizes().vec(), std::vector<std::byte>(plain.nbytes())};
  std::memcpy(result.bytes.data(), plain.const_data_ptr(), plain.nbytes());
  return result;
}

TEST(LoadWeights, SkipMismatchLeavesWhatHasAnotherShape) {
  const auto path = (fresh_folder("load_weights", "mismatch") / "w").string();
  const auto saved = model_of(4);
  saved.save_weights(path);
  for (const bool is_built : {true, false}) {
    const MirroredStrategy strategy(2);
    const auto scope = strategy.scope();
    set_random_seed(8);
    const auto before = values_of(model_of(5));
    set_random_seed(8);
    auto model = is_built ? model_of(5) : Sequential({Dense(3), BatchNormalization(), Dense(5)});
    if (is_built) {
      const auto message = message_of<InvalidArgument>([&] { model.load_weights(path); });
      expect_says(message, "in the checkpoint and [");
      expect_says(message_of<InvalidArgument>([&] { model.load_weights(path, {.by_name = true}); }), "another model");
    }
    model.load_weights(path, {.skip_mismatch = true});
    if (!is_built) model.build({2});
    const auto file = values_of(saved), after = values_of(model);
    int loaded = 0;
    for (const auto& [name, value] : after) {
      const bool fits = file.at(name).sizes() == value.sizes();
      loaded += fits ? 1 : 0;
      EXPECT_TRUE(at::equal(value, fits ? file.at(name) : before.at(name))) << name << is_built;
    }
    EXPECT_EQ(static_cast<std::size_t>(loaded) + 2, after.size());  // all but the last layer's kernel and bias
  }
}

TEST(LoadWeights, ByNameLeavesWhatTheFileLacksAndPassesOverTheRest) {
  const auto path = (fresh_folder("load_weights", "by_name") / "w").string();
  auto model = model_of(4);
  const auto before = values_of(model);
  Archive archive;
  const auto name = before.begin()->first;
  const auto other = at::randn(before.begin()->second.sizes());
  archive.tensors[name] = stored(other, DType::float32);
  archive.tensors["of/another"] = stored(at::zeros({3}), DType::float32);
  write_archive(path, archive);
  expect_says(message_of<InvalidArgument>([&] { model.load_weights(path); }), "of/another is not in the model");
  testing::internal::CaptureStderr();
  model.load_weights(path, {.by_name = true});
  const auto said = testing::internal::GetCapturedStderr();
  expect_says(said, "takes 1 variables");
  expect_says(said, std::next(before.begin())->first + " is missing in the checkpoint");
  expect_says(said, "of/another is not in the model");
  for (const auto& [key, value] : values_of(model)) {
    EXPECT_TRUE(at::equal(value, key == name ? other : before.at(key))) << key;
  }

  archive.tensors.erase(name);
  write_archive(path, archive);
  expect_says(message_of<InvalidArgument>([&] { model.load_weights(path, {.by_name = true}); }),
              "no variable of the model would be loaded");
}

TEST(LoadWeights, ValuesOf16BitsAreConvertedAndOtherDtypesAreRefused) {
  const auto path = (fresh_folder("load_weights", "half") / "w").string();
  auto model = model_of(4);
  const auto before = values_of(model);
  for (const auto& [dtype, name] : {std::pair(at::kHalf, DType::float16), std::pair(at::kBFloat16, DType::bfloat16)}) {
    Archive archive;
    for (const auto& [key, value] : before) {
      archive.tensors[key] =
          value.scalar_type() == at::kFloat ? stored((value * 3).to(dtype), name) : stored(value, DType::int64);
    }
    write_archive(path, archive);
    model.load_weights(path);
    for (const auto& [key, value] : values_of(model)) {
      if (value.scalar_type() != at::kFloat) continue;
      EXPECT_TRUE(at::equal(value, (before.at(key) * 3).to(dtype).to(at::kFloat))) << key;
    }
    archive.tensors[before.begin()->first] = stored(before.begin()->second.to(at::kDouble), DType::float64);
    write_archive(path, archive);
    expect_says(message_of<InvalidArgument>([&] { model.load_weights(path); }), "has dtype Double");
  }
}

TEST(LoadWeights, AnEncodersOutputsAreThoseOfAModelThatTakesItsWeights) {
  const auto x = at::sin(at::arange(36, at::kFloat)).view({12, 3});
  const auto data = Dataset::from_tensor_slices(x, x).batch(4);
  const auto path = (fresh_folder("load_weights", "encoder") / "w").string();
  const OneDeviceStrategy strategy("cpu:0");
  const auto scope = strategy.scope();
  const auto make_encoder = [] { return Sequential({Dense(4, {.activation = "relu"}), Dense(2)}); };
  auto encoder = make_encoder();
  Sequential model({Layer(encoder), Layer(Sequential({Dense(3)}))});
  model.compile({.optimizer = Adam({.learning_rate = 0.05}), .loss = "mse"});
  model.fit(data, {.epochs = 2, .verbose = 0});
  expect_says(message_of<InvalidArgument>([&] { encoder.predict(data); }),
              "call predict of that model. For the outputs of this part alone");
  model.save_weights(path);
  Sequential part({Layer(make_encoder())});
  part.load_weights(path, {.by_name = true});
  auto values = values_of(model);
  const auto linear = [&](const Tensor& input, const std::string& layer) {
    return at::linear(input, values.at("sequential." + layer + ".weight"), values.at("sequential." + layer + ".bias"));
  };
  const auto expected = linear(at::relu(linear(x, "dense")), "dense_1");
  EXPECT_LE((part.predict(data) - expected).abs().max().item<float>(), 1e-6);
}

}  // namespace
}  // namespace lockstep
