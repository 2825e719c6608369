// The callbacks that save. Names, options and defaults are those of keras.callbacks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/callback.h"

namespace lockstep {

class BackgroundSave;
class FolderLock;

struct ModelCheckpointOptions {
  std::string monitor = "val_loss";
  bool save_best_only = false;
  bool save_weights_only = false;  // else the full state: optimizer, step, data position, random state too
  Mode mode = Mode::automatic;
  std::int64_t save_freq = 0;  // batches between saves; 0: each epoch
  int max_to_keep = 0;         // 0: all

  // The next step waits for a copy in memory, and not for the disk. All workers that see the folder copy and write,
  // each its part. One that was being written when workers were lost is made again, of the step that comes then.
  bool background = false;
};

// Saves to `filepath`, in which {epoch} (from 1), {batch} and the logs' names are replaced. They may have a format, as
// in {epoch:02d} or {val_loss:.2f}, of at most 200 digits. Where an epoch was not validated, or was interrupted before,
// a value is nan. Records each checkpoint in the folder's `checkpoint` index, which latest_checkpoint reads. Training
// throws as it begins. InvalidArgument: for a name in `filepath` that no log will have, and for other formats; with
// save_best_only and Mode::automatic, where nothing says which way the monitored value gets better. IoError: where the
// folder cannot be written, or its file `checkpoint` is no index. Where a checkpoint cannot be saved later (the disk is
// full), the training goes on with a warning. It throws IoError at its end if that was the last checkpoint.
class ModelCheckpoint : public Callback {
 public:
  explicit ModelCheckpoint(std::string filepath, ModelCheckpointOptions options = {});
  void on_train_begin() override;
  void on_epoch_begin(int epoch) override { epoch_ = epoch; }
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_interrupt() override;
  void on_train_end() override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;
  void detach() noexcept override;
  Order order() const override { return options_.save_weights_only ? Order::normal : Order::saves_state; }

 private:
  void save_model(std::int64_t batch, const Logs& logs);
  void begin_to_write(const std::string& path);
  void make_again();
  void finish_writing();
  bool improves(const Logs& logs);

  std::string filepath_;
  ModelCheckpointOptions options_;
  Mode mode_ = Mode::automatic;  // resolved as training begins, with save_best_only
  int epoch_ = 0;
  std::int64_t since_save_ = 0;
  std::int64_t batch_ = 0;
  Logs logs_;
  std::optional<double> best_;
  std::string written_;            // the path of the last one in the background
  std::vector<std::string> kept_;  // the checkpoints that this callback saved and keeps
  std::string problem_;            // of the last one
  std::shared_ptr<BackgroundSave> background_;
};

struct BackupAndRestoreOptions {
  std::int64_t save_freq = 0;     // batches between backups; they are made at the end of each epoch too
  bool delete_checkpoint = true;  // when the program ends with status 0 after fit ended well
  bool background = false;        // as ModelCheckpointOptions
};

// Keeps the full state of training in `backup_dir`, and goes on from the last backup when fit begins, in the middle of
// an epoch too. A run that was killed and started again ends with the same bits as one that never was. A program that
// fails after fit has ended, and is started again, finds the training at its end and does not train anew. Each job
// needs a folder of its own: where another one uses it, fit throws IoError when training begins.
//
// The backup before the last one is kept too, but for jobs with parameter servers. Where the last one is cut short or
// altered, fit goes on from the one before, with a warning. Where a backup cannot be written (the disk is full) the
// training goes on with a warning; the one at its end throws IoError.
class BackupAndRestore : public Callback {
 public:
  explicit BackupAndRestore(std::string backup_dir, BackupAndRestoreOptions options = {});
  void on_train_begin() override;
  void on_join() override;
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_train_end() override;
  void on_interrupt() override;
  std::function<void()> on_state_lost() override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;
  void detach() noexcept override;
  Order order() const override { return Order::restores_state; }

 private:
  void back_up(bool in_background = false);
  void write_backup(bool in_background);
  void load_last_whole(const std::function<void()>& load);
  void take_one_before(const std::string& problem);
  void take_folder();
  bool is_there() const;

  std::string folder_;
  std::string file_, previous_;
  BackupAndRestoreOptions options_;
  std::shared_ptr<FolderLock> lock_;  // the chief's, while fit runs
  std::shared_ptr<BackgroundSave> background_;
};

}  // namespace lockstep
