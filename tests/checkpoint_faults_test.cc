// Checkpoints where the disk is full, or has altered what was written.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/module.h>

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "fails_after.h"
#include "small_disk.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kUnits = 20'000, kEpochs = 4;  // 160 KB of weights

Sequential wide_model() {
  set_random_seed(5);
  Sequential model({Dense(kUnits)});
  model.compile({.optimizer = SGD({.learning_rate = 0.1}), .loss = "mse"});
  return model;
}

Dataset wide_data() {
  const auto x = at::sin(at::arange(12, at::kFloat)).view({12, 1});
  return Dataset::from_tensor_slices(x, x.expand({12, kUnits})).shuffle(12, {.seed = 3}).batch(4);
}

Tensor weights(const Sequential& model) { return model.module<torch::nn::Module>()->parameters()[0].clone(); }

void alter(const fs::path& file) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(0, std::ios::end);
  const auto middle = stream.tellg() / 2;
  stream.seekg(middle);
  const auto byte = static_cast<char>(stream.get());
  stream.seekp(middle);
  stream.put(static_cast<char>(byte ^ 1));
  ASSERT_TRUE(stream.good());
}

// The parameter: true where the callbacks write in the background.
class FullDisk : public testing::TestWithParam<bool> {};

TEST_P(FullDisk, DoesNotEndTheTraining) {
  const auto folder = fresh_folder("checkpoint_faults", GetParam() ? "full_in_background" : "full");
  const SmallDisk disk(folder);
  auto model = wide_model();
  const auto fills = LambdaCallback({.on_epoch_begin = [&](int epoch) {
    if (epoch == 1) disk.fill();
    if (epoch == 3) disk.make_room();
  }});
  const auto backup = (folder / "backup").string();
  model.fit(wide_data(),
            {.epochs = kEpochs,
             .verbose = 0,
             .callbacks = {fills,
                           ModelCheckpoint((folder / "{epoch}").string(), {.max_to_keep = 1, .background = GetParam()}),
                           BackupAndRestore(backup, {.delete_checkpoint = false, .background = GetParam()})}});
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "4").string());
  EXPECT_FALSE(fs::exists(folder / "3.safetensors"));
  EXPECT_NO_THROW(read_archive((folder / "backup" / "backup").string()));
}

INSTANTIATE_TEST_SUITE_P(CheckpointFaults, FullDisk, testing::Bool());

TEST(CheckpointFaults, WhatIsWrittenInTheBackgroundIsTheSame) {
  const auto folder = fresh_folder("checkpoint_faults", "background");
  const auto train = [&](bool background) {
    const auto own = folder / (background ? "background" : "waiting");
    auto model = wide_model();
    model.fit(wide_data(),
              {.epochs = kEpochs,
               .verbose = 0,
               .callbacks = {ModelCheckpoint((own / "{epoch}").string(),
                                             {.save_weights_only = true, .max_to_keep = 2, .background = background}),
                             BackupAndRestore((own / "backup").string(),
                                              {.delete_checkpoint = false, .background = background})}});
    return own;
  };
  const auto background = train(true), waiting = train(false);
  for (const auto* const name : {"3", "4", "backup/backup", "backup/backup-previous"}) {
    SCOPED_TRACE(name);
    const auto one = read_archive((background / name).string()), other = read_archive((waiting / name).string());
    ASSERT_EQ(one.tensors.size(), other.tensors.size());
    for (const auto& [key, tensor] : one.tensors) EXPECT_EQ(tensor.bytes, other.tensors.at(key).bytes) << key;
  }
  EXPECT_FALSE(fs::exists(background / "2.safetensors"));
  EXPECT_EQ(latest_checkpoint(background.string()), (background / "4").string());
}

TEST(CheckpointFaults, TheLastCheckpointMustBeSaved) {
  const auto folder = fresh_folder("checkpoint_faults", "full_at_end");
  const SmallDisk disk(folder);
  auto model = wide_model();
  const auto fills = LambdaCallback({.on_epoch_begin = [&](int epoch) {
    if (epoch == kEpochs - 1) disk.fill();
  }});
  const auto said = message_of<IoError>([&] {
    model.fit(wide_data(), {.epochs = kEpochs,
                            .verbose = 0,
                            .callbacks = {fills, ModelCheckpoint((folder / "{epoch}").string(), {.max_to_keep = 1})}});
  });
  expect_says(said, "ModelCheckpoint: cannot write ");
  expect_says(said, "No space left on device");
  EXPECT_EQ(model.iterations(), 3 * kEpochs);
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "3").string());
}

TEST(CheckpointFaults, AnAlteredBackupIsReplacedByTheOneBeforeIt) {
  const auto folder = fresh_folder("checkpoint_faults", "altered");
  const auto options = [&](const fs::path& backup) {
    return FitOptions{
        .epochs = kEpochs, .verbose = 0, .callbacks = {BackupAndRestore(backup.string(), {.save_freq = 1})}};
  };
  auto whole = wide_model();
  whole.fit(wide_data(), options(folder / "whole"));
  const auto backup = folder / "stopped";
  {
    auto stopped = wide_model();
    auto some = options(backup);
    some.callbacks.emplace_back(FailsAfter(2));
    EXPECT_THROW(stopped.fit(wide_data(), some), std::runtime_error);
  }
  alter(backup / "backup.safetensors");
  auto model = wide_model();
  model.fit(wide_data(), options(backup));
  EXPECT_TRUE(at::equal(weights(model), weights(whole)));
  EXPECT_TRUE(fs::exists(backup / "backup-damaged.safetensors"));
}

TEST(CheckpointFaults, WhereNoBackupIsWholeNothingIsChanged) {
  const auto folder = fresh_folder("checkpoint_faults", "both");
  {
    auto stopped = wide_model();
    EXPECT_THROW(
        stopped.fit(wide_data(),
                    {.verbose = 0, .callbacks = {BackupAndRestore(folder.string(), {.save_freq = 1}), FailsAfter(2)}}),
        std::runtime_error);
  }
  alter(folder / "backup.safetensors");
  alter(folder / "backup-previous.safetensors");
  auto model = wide_model();
  expect_says(message_of<DataError>(
                  [&] { model.fit(wide_data(), {.verbose = 0, .callbacks = {BackupAndRestore(folder.string())}}); }),
              "backup");
  EXPECT_EQ(model.iterations(), 0);
}

TEST(CheckpointFaults, TheLatestCheckpointIsTheLastWholeOne) {
  const auto folder = fresh_folder("checkpoint_faults", "latest");
  auto model = wide_model();
  model.fit(wide_data(), {.epochs = 3, .verbose = 0, .callbacks = {ModelCheckpoint((folder / "{epoch}").string())}});
  alter(folder / "3.safetensors");
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "2").string());
  fs::remove(folder / "2.safetensors");
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "1").string());
}

TEST(CheckpointFaults, ADamagedSpareOfABackupIsPutAsideAndStopsNoRestart) {
  for (const char* const name : {"backup-previous.safetensors", "backup-previous.safetensors.part"}) {
    const auto folder = fresh_folder("checkpoint_faults", "spare");
    std::ofstream(folder / name) << "half of it";
    auto model = model_of_noise();
    model.fit(noise(), {.verbose = 0, .callbacks = {BackupAndRestore(folder.string())}});
    EXPECT_GT(model.iterations(), 0);
    EXPECT_EQ(fs::file_size(folder / "backup-damaged.safetensors"), 10U);
  }
}

TEST(CheckpointFaults, ABackupRefusesToReplaceAFileOfSomebodyElse) {
  for (const char* const name : {"backup-previous.safetensors", "backup-previous.safetensors.part"}) {
    const auto folder = fresh_folder("checkpoint_faults", "in_the_way");
    std::ofstream(folder / "victim") << "of somebody";
    fs::create_symlink("victim", folder / name);
    auto model = model_of_noise();
    expect_says(message_of<IoError>(
                    [&] { model.fit(noise(), {.verbose = 0, .callbacks = {BackupAndRestore(folder.string())}}); }),
                "no file that Lockstep wrote");
    EXPECT_EQ(model.iterations(), 0);
    EXPECT_TRUE(fs::is_symlink(folder / name));
    EXPECT_EQ(fs::file_size(folder / "victim"), 11U);
  }
}

TEST(CheckpointFaults, ADamagedBackupLeavesAnEarlierFileOfItsName) {
  const auto folder = fresh_folder("checkpoint_faults", "damaged");
  {
    auto stopped = model_of_noise();
    EXPECT_THROW(
        stopped.fit(noise(),
                    {.verbose = 0, .callbacks = {BackupAndRestore(folder.string(), {.save_freq = 1}), FailsAfter(2)}}),
        std::runtime_error);
  }
  alter(folder / "backup.safetensors");
  std::ofstream(folder / "backup-damaged.safetensors") << "of somebody";
  auto model = model_of_noise();
  model.fit(noise(), {.verbose = 0, .callbacks = {BackupAndRestore(folder.string())}});
  EXPECT_EQ(fs::file_size(folder / "backup-damaged.safetensors"), 11U);
  EXPECT_TRUE(fs::exists(folder / "backup-damaged-2.safetensors"));
}

}  // namespace
}  // namespace lockstep
