// Checkpoints where the disk is full, or has altered what was written.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <sys/mount.h>
#include <torch/nn/module.h>

#include <ATen/ATen.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "fails_after.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kUnits = 20'000, kEpochs = 4;  // 160 KB of weights

Sequential model_of_noise() {
  set_random_seed(5);
  Sequential model({Dense(kUnits)});
  model.compile({.optimizer = SGD({.learning_rate = 0.1}), .loss = "mse"});
  return model;
}

Dataset noise() {
  const auto x = at::sin(at::arange(12, at::kFloat)).view({12, 1});
  return Dataset::from_tensor_slices(x, x.expand({12, kUnits})).shuffle(12, {.seed = 3}).batch(4);
}

Tensor weights(const Sequential& model) { return model.module<torch::nn::Module>()->parameters()[0].clone(); }

// A file system of one megabyte.
class SmallDisk {
 public:
  explicit SmallDisk(fs::path folder) : folder_(std::move(folder)) {
    if (mount("none", folder_.c_str(), "tmpfs", 0, "size=1m") != 0) {
      throw std::runtime_error(std::string("cannot mount a file system: ") + std::strerror(errno));
    }
  }
  ~SmallDisk() { umount2(folder_.c_str(), MNT_DETACH); }
  void fill() const {
    std::ofstream filler(folder_ / "filler");
    for (const std::string bytes(1 << 16, 'x'); filler << bytes << std::flush;) {
    }
  }
  void make_room() const { fs::remove(folder_ / "filler"); }

 private:
  const fs::path folder_;
};

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

TEST(CheckpointFaults, TrainingGoesOnWhileTheDiskIsFull) {
  const auto folder = fresh_folder("checkpoint_faults", "full");
  const SmallDisk disk(folder);
  auto model = model_of_noise();
  const auto fills = LambdaCallback({.on_epoch_begin = [&](int epoch) {
    if (epoch == 1) disk.fill();
    if (epoch == 2) disk.make_room();
  }});
  model.fit(noise(), {.epochs = kEpochs,
                      .verbose = 0,
                      .callbacks = {fills, ModelCheckpoint((folder / "{epoch}").string(), {.max_to_keep = 1}),
                                    BackupAndRestore((folder / "backup").string(), {.delete_checkpoint = false})}});
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "4").string());
  EXPECT_FALSE(fs::exists(folder / "2.safetensors"));
  EXPECT_NO_THROW(read_archive((folder / "backup" / "backup").string()));
}

TEST(CheckpointFaults, TheLastCheckpointMustBeSaved) {
  const auto folder = fresh_folder("checkpoint_faults", "full_at_end");
  const SmallDisk disk(folder);
  auto model = model_of_noise();
  const auto fills = LambdaCallback({.on_epoch_begin = [&](int epoch) {
    if (epoch == kEpochs - 1) disk.fill();
  }});
  const auto said = message_of<IoError>([&] {
    model.fit(noise(), {.epochs = kEpochs,
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
  auto whole = model_of_noise();
  whole.fit(noise(), options(folder / "whole"));
  const auto backup = folder / "stopped";
  {
    auto stopped = model_of_noise();
    auto some = options(backup);
    some.callbacks.emplace_back(FailsAfter(2));
    EXPECT_THROW(stopped.fit(noise(), some), std::runtime_error);
  }
  alter(backup / "backup.safetensors");
  auto model = model_of_noise();
  model.fit(noise(), options(backup));
  EXPECT_TRUE(at::equal(weights(model), weights(whole)));
  EXPECT_TRUE(fs::exists(backup / "backup-damaged.safetensors"));
}

TEST(CheckpointFaults, WhereNoBackupIsWholeNothingIsChanged) {
  const auto folder = fresh_folder("checkpoint_faults", "both");
  {
    auto stopped = model_of_noise();
    EXPECT_THROW(
        stopped.fit(noise(),
                    {.verbose = 0, .callbacks = {BackupAndRestore(folder.string(), {.save_freq = 1}), FailsAfter(2)}}),
        std::runtime_error);
  }
  alter(folder / "backup.safetensors");
  alter(folder / "backup-previous.safetensors");
  auto model = model_of_noise();
  expect_says(message_of<DataError>(
                  [&] { model.fit(noise(), {.verbose = 0, .callbacks = {BackupAndRestore(folder.string())}}); }),
              "backup");
  EXPECT_EQ(model.iterations(), 0);
}

TEST(CheckpointFaults, TheLatestCheckpointIsTheLastWholeOne) {
  const auto folder = fresh_folder("checkpoint_faults", "latest");
  auto model = model_of_noise();
  model.fit(noise(), {.epochs = 3, .verbose = 0, .callbacks = {ModelCheckpoint((folder / "{epoch}").string())}});
  alter(folder / "3.safetensors");
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "2").string());
  fs::remove(folder / "2.safetensors");
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "1").string());
}

}  // namespace
}  // namespace lockstep
