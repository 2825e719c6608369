// Bad input is a clear error, and nothing is lost.
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <sys/mount.h>
#include <zlib.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/fresh_folder_testing.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Expects that `call` throws E with every one of `parts` in its text.
template <class E, class Call>
void expect_error(const Call& call, std::initializer_list<std::string> parts) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const E& error) {
    for (const auto& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in: " << error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type was thrown: " << error.what();
  }
}

TEST(BadInput, DataParallelismOverShardsIsRefused) {
  torch::nn::Linear layer(4, 4);
  const auto sharded = fully_shard(layer, Communicator());
  expect_error<InvalidArgument>([&] { DistributedDataParallel ddp(layer, Communicator()); },
                                {"weight has no values", "averages its gradients itself"});
}

std::string big_endian(std::uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string idx(std::uint32_t magic, std::initializer_list<std::uint32_t> sizes, std::size_t bytes) {
  std::string file = big_endian(magic);
  for (const auto size : sizes) file += big_endian(size);
  return file + std::string(bytes, '\1');
}

std::string write(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path.string();
}

std::string contents(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

std::string gzip(const std::string& bytes) {
  z_stream stream{};
  deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(bytes.size() + 1000, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

TEST(BadInput, IdxFiles) {
  const auto folder = fresh_folder("bad_input", "idx");
  const auto images = write(folder / "images", idx(0x803, {4, 2, 2}, 16));
  const auto labels = write(folder / "labels", idx(0x801, {4}, 4));
  EXPECT_EQ(Dataset::from_idx(images, labels).cardinality(), 4);

  const auto whole = gzip(idx(0x803, {4, 20, 20}, 1600));
  EXPECT_EQ(Dataset::from_idx(write(folder / "whole.gz", whole), labels).cardinality(), 4);
  const auto load = [&](const std::string& path) { return [path, labels] { Dataset::from_idx(path, labels); }; };
  expect_error<DataError>(load(write(folder / "cut.gz", whole.substr(0, whole.size() - 12))), {"cut.gz", "at byte"});
  expect_error<DataError>(load(write(folder / "cut", idx(0x803, {4, 2, 2}, 13))),
                          {"cut, at byte 29", "bytes are missing"});
  expect_error<DataError>(load(write(folder / "magic", idx(0x12345678, {4}, 4))),
                          {"magic", "magic number is 18 52 86 120"});
  expect_error<DataError>(load(write(folder / "type", idx(0x0d03, {4, 2, 2}, 16))), {"type 13", "unsigned bytes"});
  expect_error<DataError>(load(write(folder / "huge", idx(0x803, {0xffffffff, 0xffffffff, 0xffffffff}, 16))),
                          {"huge", "larger than any"});
  expect_error<DataError>(load(write(folder / "claims", idx(0x803, {1000000, 1000, 1000}, 16))),
                          {"claims", "bytes are missing"});
  expect_error<DataError>(load(write(folder / "extra", idx(0x803, {4, 2, 2}, 17))), {"more bytes follow"});
  expect_error<DataError>(load(write(folder / "three", idx(0x803, {3, 2, 2}, 12))), {"3 images", "4 labels"});
  expect_error<IoError>(load((folder / "nowhere").string()), {"nowhere", "No such file"});
  expect_error<IoError>([&] { datasets::mnist(folder.string()); }, {"train-images-idx3-ubyte"});
}

Sequential small_model() {
  Sequential model({Dense(3)});
  model.compile({.loss = SparseCategoricalCrossentropy({.from_logits = true})});
  model.build({2});
  return model;
}

Dataset small_data(std::int64_t label = 0) {
  return Dataset::from_tensor_slices(at::ones({4, 2}), at::full({4}, label, at::kLong)).batch(2);
}

TEST(BadInput, Training) {
  auto model = small_model();
  expect_error<InvalidArgument>([&] { model.fit(small_data(3), {.verbose = 0}); },
                                {"a label is 3", "3 outputs", "0 to 2"});
  expect_error<InvalidArgument>([&] { model.fit(small_data(-1), {.verbose = 0}); }, {"a label is -1"});
  for (const double label : {0.5, std::nan("")}) {
    const auto fractions = Dataset::from_tensor_slices(at::ones({4, 2}), at::full({4}, label)).batch(2);
    expect_error<InvalidArgument>([&] { model.fit(fractions, {.verbose = 0}); }, {"labels are fractions"});
  }
  const auto empty = Dataset::from_tensor_slices(at::ones({0, 2}), at::ones({0}, at::kLong)).batch(2);
  expect_error<InvalidArgument>([&] { model.fit(empty, {.verbose = 0}); }, {"yielded no batch"});
  expect_error<InvalidArgument>([&] { model.evaluate(empty); }, {"empty"});
  expect_error<InvalidArgument>([&] { model.fit(small_data(), {.epochs = 0, .verbose = 0}); }, {"epochs is 0"});
  expect_error<InvalidArgument>([&] { model.evaluate(small_data().repeat()); }, {"endless"});
  expect_error<InvalidArgument>(
      [&] {
        model.fit(Dataset::from_tensor_slices(at::ones({4, 2})).batch(2), {.verbose = 0});
      },
      {"no y"});
  Sequential uncompiled({Dense(3)});
  expect_error<InvalidArgument>([&] { uncompiled.fit(small_data()); }, {"compile"});
  expect_error<InvalidArgument>([&] { uncompiled.summary(); }, {"build"});
  model.fit(small_data(), {.verbose = 0});  // works after all that
}

TEST(BadInput, StrategiesAndSettings) {
  expect_error<InvalidArgument>([] { MirroredStrategy strategy(0); }, {"replicas is 0"});
  expect_error<InvalidArgument>([] { MirroredStrategy strategy({.devices = {"tpu:0"}}); }, {"tpu:0", "cpu:0"});
  expect_error<InvalidArgument>([] { MirroredStrategy strategy({.devices = {"cpu:x"}}); }, {"cpu:x"});
  expect_error<InvalidArgument>([] { MirroredStrategy strategy({.devices = {"cuda:77"}}); }, {"cuda:77"});
  expect_error<InvalidArgument>(
      [] {
        MirroredStrategy strategy({.devices = {"cpu:0", "cpu:0"}});
      },
      {"cpu:0 is named twice"});
  expect_error<InvalidArgument>([] { Optimizer optimizer("adamm"); }, {"adamm", "rmsprop"});
  expect_error<InvalidArgument>([] { Adam adam({.clipnorm = 1, .clipvalue = 1}); }, {"only one of"});
  expect_error<InvalidArgument>([] { Adam adam({.learning_rate = -1}); }, {"learning_rate is -1"});
  expect_error<InvalidArgument>([] { Metric metric("acuracy"); }, {"acuracy", "accuracy"});
  expect_error<InvalidArgument>([] { Loss loss("msse"); }, {"msse"});
  expect_error<InvalidArgument>([] { Dense dense(4, {.activation = "rellu"}); }, {"rellu", "relu"});
  expect_error<InvalidArgument>([] { Dropout dropout(1.5); }, {"1.5"});
  expect_error<InvalidArgument>([] { Conv2D convolution(4, 3, {.padding = "full"}); }, {"full", "valid"});
  Sequential dense_on_images({Flatten(), Conv2D(4, 3)});
  expect_error<InvalidArgument>([&] { dense_on_images.build({1, 8, 8}); }, {"Conv2D", "[1, 64]"});
  expect_error<InvalidArgument>([&] { dense_on_images.build({-1, 8, 8}); }, {"input_shape is -1", "left out"});
}

TEST(BadInput, Checkpoints) {
  const auto folder = fresh_folder("bad_input", "checkpoints");
  auto model = small_model();
  const auto path = (folder / "good").string();
  model.save_weights(path);
  const auto file = contents(path + ".safetensors");
  const auto before = model.predict(small_data());
  const auto load = [&](const std::string& name, const std::string& bytes) {
    write(folder / (name + ".safetensors"), bytes);
    return [&model, loaded = (folder / name).string()] { model.load_weights(loaded); };
  };
  for (const std::size_t length : {std::size_t{0}, std::size_t{5}, std::size_t{100}, file.size() - 1}) {
    expect_error<DataError>(load("cut", file.substr(0, length)), {"cut.safetensors", "at byte"});
  }
  for (std::size_t at = 0; at < file.size(); ++at) {  // any one bit, anywhere
    auto flipped = file;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << at % 8));
    EXPECT_THROW(load("flipped", flipped)(), Error) << "byte " << at;
  }
  expect_error<IoError>([&] { model.load_weights((folder / "none").string()); }, {"none.safetensors", "No such file"});
  expect_error<InvalidArgument>([&] { model.load_weights(latest_checkpoint((folder / "nowhere").string())); },
                                {"no checkpoint"});

  Sequential other({Dense(4), Dense(3)});
  other.build({2});
  other.save_weights((folder / "other").string());
  expect_error<InvalidArgument>(
      [&] { model.load_weights((folder / "other").string()); },
      {"dense.bias is [4] in the checkpoint and [3] in the model", "dense_1.weight is not in the model"});
  EXPECT_TRUE(at::equal(model.predict(small_data()), before));
}

TEST(BadInput, AFullDiskLeavesTheLastCheckpointWhole) {
  const auto folder = fresh_folder("bad_input", "full_disk");
  ASSERT_EQ(::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=64k"), 0) << "needs root to mount a small disk";
  auto model = small_model();
  model.save_weights((folder / "ckpt").string());
  const auto before = contents(folder / "ckpt.safetensors");
  write(folder / "filler", std::string(60'000, 'x'));
  expect_error<IoError>([&] { model.save_weights((folder / "ckpt").string()); }, {"ckpt.safetensors", "No space left"});
  EXPECT_EQ(contents(folder / "ckpt.safetensors"), before);
  model.load_weights((folder / "ckpt").string());
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder)) ++files;
  EXPECT_EQ(files, 2U);  // the checkpoint and the filler
  ::umount(folder.c_str());
}

TEST(BadInput, AnUnwritableLogFolder) {
  const auto folder = fresh_folder("bad_input", "logs");
  write(folder / "file", "in the way");
  auto model = small_model();
  expect_error<IoError>(
      [&] { model.fit(small_data(), {.verbose = 0, .callbacks = {TensorBoard((folder / "file" / "logs").string())}}); },
      {"file/logs"});
  EXPECT_EQ(model.iterations(), 0);
}

TEST(BadInput, WhatLibTorchRefusesInAMapNamesTheElement) {
  auto data = Dataset::from_tensor_slices(at::rand({4, 3}), at::zeros({4})).map([](Example e) {
    e.x = e.x.reshape({7});
    return e;
  });
  expect_error<DataError>([&] { data.batch(2).iterate().next(); }, {"map", "element 0", "shape '[7]'"});
}

TEST(BadInput, AFitWithinAFitOfTheSameModelIsRefused) {
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD(), .loss = "mse"});
  const auto data = Dataset::from_tensor_slices(at::rand({4, 2}), at::rand({4, 1})).batch(2);
  int epochs = 0;
  const auto again = LambdaCallback({.on_epoch_end = [&](int, const Logs&) {
    ++epochs;
    EXPECT_THROW(model.fit(data, {.verbose = 0}), InvalidArgument);
  }});
  model.fit(data, {.epochs = 2, .verbose = 0, .callbacks = {again}});
  EXPECT_EQ(epochs, 2);
  EXPECT_THROW(model.fit(data, {.verbose = 0, .class_weight = {{1, -1.0}}}), InvalidArgument);
}

}  // namespace
}  // namespace lockstep
