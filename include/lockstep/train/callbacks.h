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
#include "lockstep/train/saving_callbacks.h"

namespace lockstep {

// Event files for TensorBoard: `log_dir`/train with epoch_loss, epoch_accuracy, ... and epoch_learning_rate,
// `log_dir`/validation alike.
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

// Sets the learning rate of each epoch to schedule(epoch, rate so far).
class LearningRateScheduler : public Callback {
 public:
  // Throws InvalidArgument for an empty function.
  explicit LearningRateScheduler(std::function<double(int epoch, double rate)> schedule);
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
  double min_delta = 0;  // its absolute value counts
  int patience = 0;
  Mode mode = Mode::automatic;
  std::optional<double> baseline = {};
  bool restore_best_weights = false;
  int start_from_epoch = 0;
};
class EarlyStopping : public Callback {
 public:
  // Throws InvalidArgument for a number that is out of range. Training throws it as it begins where the mode is
  // automatic and nothing says which way the monitored value gets better.
  explicit EarlyStopping(EarlyStoppingOptions options = {});
  void on_train_begin() override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_train_end() override;
  void save(Archive& archive, const std::string& prefix) const override;
  std::function<void()> load(const Archive& archive, const std::string& prefix) override;

  int stopped_epoch() const { return stopped_epoch_; }

 private:
  bool better(double value, double than) const;

  EarlyStoppingOptions options_;
  Mode mode_ = Mode::automatic;  // resolved as training begins
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

// Writes one line an epoch to a file, values with the separator between them, from the chief alone. With `append` a
// last line that was cut off stays as it is, with a warning, and new lines follow it. Training throws IoError where the
// file cannot be written.
class CSVLogger : public Callback {
 public:
  explicit CSVLogger(std::string filename, CSVLoggerOptions options = {});
  void on_train_begin() override;
  void on_become_chief() override;
  void on_epoch_begin(int /*epoch*/) override { written_before_.reset(); }
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
  std::vector<std::string> columns_;   // empty before the first line
  std::optional<int> written_before_;  // the last epoch that another chief has written
};

// Stops when the loss is NaN or infinite.
class TerminateOnNaN : public Callback {
 public:
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
};

}  // namespace lockstep
