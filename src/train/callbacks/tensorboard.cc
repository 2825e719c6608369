#include <filesystem>
#include <optional>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/model.h"
#include "train/callbacks/event_file.h"
#include "train/model_impl.h"

namespace lockstep {

// The folders that Keras writes to, each made when something goes into it.
struct TensorBoard::Writers {
  explicit Writers(const std::filesystem::path& log_dir) : directory(log_dir) {}

  train::EventFile& train() { return train_file ? *train_file : train_file.emplace((directory / "train").string()); }
  train::EventFile& validation() {
    return validation_file ? *validation_file : validation_file.emplace((directory / "validation").string());
  }

  std::filesystem::path directory;
  std::optional<train::EventFile> train_file, validation_file;
};

TensorBoard::TensorBoard(std::string log_dir, TensorBoardOptions options)
    : log_dir_(std::move(log_dir)), options_(options) {
  if (options_.update_freq < 0) {
    throw InvalidArgument(
        text("TensorBoard: update_freq is ", options_.update_freq, "; it must be 0 (epochs only) or more"));
  }
}

void TensorBoard::on_train_begin() {
  writers_ = std::make_shared<Writers>(log_dir_);
  writers_->train();  // fails before the first step where the folder cannot be written
}

void TensorBoard::on_train_batch_end(std::int64_t, const Logs& logs) {
  const auto step = model().iterations();
  if (!unwrap(model()).fit.passed_multiple(step, options_.update_freq)) return;
  for (const auto& [name, value] : logs) writers_->train().scalar("batch_" + name, step, value);
}

// In an evaluator it is called without on_train_begin.
void TensorBoard::on_test_end(const Logs& logs) {
  if (!writers_) writers_ = std::make_shared<Writers>(log_dir_);
  for (const auto& [name, value] : logs) {
    writers_->validation().scalar("evaluation_" + name + "_vs_iterations", model().iterations(), value);
  }
  writers_->validation().flush();
}

void TensorBoard::on_epoch_end(int epoch, const Logs& logs) {
  constexpr std::string_view kValidation = "val_";
  bool validated = false;
  for (const auto& [name, value] : logs) {
    if (name.starts_with(kValidation)) {
      writers_->validation().scalar("epoch_" + name.substr(kValidation.size()), epoch, value);
      validated = true;
    } else {
      writers_->train().scalar("epoch_" + name, epoch, value);
    }
  }
  writers_->train().scalar("epoch_learning_rate", epoch, model().learning_rate());
  writers_->train().flush();
  if (validated) writers_->validation().flush();
}

void TensorBoard::on_train_end() { writers_.reset(); }

}  // namespace lockstep
