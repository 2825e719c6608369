// The callbacks that come with Lockstep. Names, options and defaults are those of keras.callbacks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/train/callback.h"

namespace lockstep {

class FolderLock;

// Event files for TensorBoard: `log_dir`/train with epoch_loss, epoch_accuracy, ... and epoch_learning_rate,
// `log_dir`/validation likewise.
struct TensorBoardOptions {
  std::int64_t update_freq = 0;  // also batch_loss, ... every so many batches; 0: at the end of epochs only
};
class TensorBoard : public Callback {
 public:
  explicit TensorBoard(std::string log_dir = "logs", TensorBoardOptions options = {});
  void on_train_begin() override;
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  void on_test_end(const Logs& logs) override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_train_end() override;
  bool only_on_chief() const override { return true; }

 private:
  struct Writers;
  std::string log_dir_;
  TensorBoardOptions options_;
  std::shared_ptr<Writers> writers_;
};

// Which way a monitored value gets better; automatic: up for names with "acc", "auc", "precision" or "recall", else
// down.
enum class Mode { automatic, min, max };

struct ModelCheckpointOptions {
  std::string monitor = "val_loss";
  bool save_best_only = false;
  bool save_weights_only = false;  // else the full state: optimizer, step, data position, random state too
  Mode mode = Mode::automatic;
  std::int64_t save_freq = 0;  // batches between saves; 0: each epoch
  int max_to_keep = 0;         // 0: all
};

// Saves to `filepath`, in which {epoch} (from 1), {batch} and the logs' names are replaced, also with a format as in
// {epoch:02d} or {val_loss:.2f}; where an epoch was not validated, or was interrupted before, a value is nan. Records
// each in the folder's `checkpoint` index, which latest_checkpoint reads. Throws when training begins: InvalidArgument
// for a name in `filepath` that no log will have, IoError where the folder cannot be written. Where one cannot be saved
// later (the disk is full) the training goes on with a warning, and throws IoError at its end if that was the last one.
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
  Order order() const override { return options_.save_weights_only ? Order::normal : Order::saves_state; }

 private:
  void save_model(std::int64_t batch, const Logs& logs);
  bool improves(const Logs& logs);

  std::string filepath_;
  ModelCheckpointOptions options_;
  int epoch_ = 0;
  std::int64_t since_save_ = 0;
  std::int64_t batch_ = 0;
  Logs logs_;
  std::optional<double> best_;
  std::vector<std::string> kept_;  // the checkpoints that this callback saved and keeps
  std::string problem_;            // of the last one
};

struct BackupAndRestoreOptions {
  std::int64_t save_freq = 0;     // batches between backups; they are made at the end of each epoch too
  bool delete_checkpoint = true;  // when the program ends with status 0 after fit ended well
};

// Keeps the full state of training in `backup_dir` and goes on from it when fit begins, in the middle of an epoch too:
// a run that was killed and started again ends with the same bits as one that never was. A program that fails after fit
// has ended, and is started again, finds the training at its end and does not train anew. Each job needs a folder of
// its own: where another one uses it, fit throws IoError when training begins.
//
// The backup before the last one is kept too, but for jobs with parameter servers: where the last one is cut short or
// altered, fit goes on from that, with a warning. Where a backup cannot be written (the disk is full) the training goes
// on with a warning; the one at its end throws IoError.
class BackupAndRestore : public Callback {
 public:
  explicit BackupAndRestore(std::string backup_dir, BackupAndRestoreOptions options = {});
  void on_train_begin() override;
  void on_join() override {}
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_train_end() override;
  void on_interrupt() override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;
  void detach() noexcept override { lock_.reset(); }
  Order order() const override { return Order::restores_state; }

 private:
  void back_up();
  void restore();

  std::string folder_;
  std::string file_, previous_;
  BackupAndRestoreOptions options_;
  std::shared_ptr<FolderLock> lock_;  // the chief's, while fit runs
};

// Sets the learning rate of each epoch to schedule(epoch, rate so far).
class LearningRateScheduler : public Callback {
 public:
  explicit LearningRateScheduler(std::function<double(int epoch, double rate)> schedule)
      : schedule_(std::move(schedule)) {}
  void on_train_begin() override { epoch_ = -1; }
  void on_epoch_begin(int epoch) override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;

 private:
  std::function<double(int, double)> schedule_;
  int epoch_ = -1;  // whose rate was set last: not again when training goes on within it
};

struct EarlyStoppingOptions {
  std::string monitor = "val_loss";
  double min_delta = 0;
  int patience = 0;
  Mode mode = Mode::automatic;
  std::optional<double> baseline = {};
  bool restore_best_weights = false;
  int start_from_epoch = 0;
};
class EarlyStopping : public Callback {
 public:
  explicit EarlyStopping(EarlyStoppingOptions options = {}) : options_(std::move(options)) {}
  void on_train_begin() override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_train_end() override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;

  int stopped_epoch() const { return stopped_epoch_; }

 private:
  bool better(double value, double than) const;

  EarlyStoppingOptions options_;
  int wait_ = 0;
  int stopped_epoch_ = -1;
  int best_epoch_ = 0;
  std::optional<double> best_;
  std::optional<Archive> best_weights_;
};

struct CSVLoggerOptions {
  char separator = ',';
  bool append = false;
};

// One line an epoch.
class CSVLogger : public Callback {
 public:
  explicit CSVLogger(std::string filename, CSVLoggerOptions options = {});
  void on_train_begin() override;
  void on_become_chief() override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;
  bool only_on_chief() const override { return true; }

 private:
  void write(const std::string& line) const;
  void write_header(const Logs& logs);
  void read_header();

  std::string filename_;
  CSVLoggerOptions options_;
  std::vector<std::string> columns_;  // empty before the first line
};

// Stops when the loss is NaN or infinite.
class TerminateOnNaN : public Callback {
 public:
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
};

}  // namespace lockstep
