// EarlyStopping, TerminateOnNaN, LearningRateScheduler.
#include <cmath>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/model.h"
#include "train/callbacks/monitor.h"
#include "train/model_impl.h"

namespace lockstep {

LearningRateScheduler::LearningRateScheduler(std::function<double(int epoch, double rate)> schedule)
    : schedule_(std::move(schedule)) {
  if (!schedule_) throw InvalidArgument("LearningRateScheduler: the schedule is empty; pass a function of the epoch");
}

void LearningRateScheduler::on_epoch_begin(int epoch) {
  if (epoch == epoch_) return;
  epoch_ = epoch;
  model().set_learning_rate(schedule_(epoch, model().learning_rate()));
}

void LearningRateScheduler::save(Archive& archive, const std::string& prefix) const {
  archive.entries[prefix + "/epoch"] = std::to_string(epoch_);
}

std::function<void()> LearningRateScheduler::load(const Archive& archive, const std::string& prefix) {
  return [this, epoch = static_cast<int>(archive.integer(prefix + "/epoch"))] { epoch_ = epoch; };
}

void TerminateOnNaN::on_train_batch_end(std::int64_t batch, const Logs& logs) {
  if (!logs.contains("loss") || std::isfinite(logs["loss"])) return;
  log_warning(text("batch ", batch, ": the loss is ", logs["loss"], "; training ends"));
  model().stop_training();
}

EarlyStopping::EarlyStopping(EarlyStoppingOptions options) : options_(std::move(options)) {
  options_.min_delta = std::abs(options_.min_delta);  // as in Keras
  require(std::isfinite(options_.min_delta), "EarlyStopping: min_delta", options_.min_delta, "a finite number");
  require(options_.patience >= 0, "EarlyStopping: patience", options_.patience, "0 or more");
  require(options_.start_from_epoch >= 0, "EarlyStopping: start_from_epoch", options_.start_from_epoch, "0 or more");
  if (options_.baseline)
    require(!std::isnan(*options_.baseline), "EarlyStopping: baseline", *options_.baseline, "a number");
}

void EarlyStopping::on_train_begin() {
  const auto& strategy = unwrap(unwrap(model()).strategy);
  if (options_.restore_best_weights && strategy.workers().is_elastic() && strategy.topology().is_split) {
    throw InvalidArgument(
        "EarlyStopping: restore_best_weights is not for an elastic mesh, whose chief alone has the best weights and "
        "may "
        "be lost; save them by ModelCheckpoint, with save_best_only");
  }
  mode_ = train::resolved("EarlyStopping", options_.mode, options_.monitor, model());
  wait_ = 0;
  stopped_epoch_ = -1;
  best_.reset();
  best_weights_.reset();
}

bool EarlyStopping::better(double value, double than) const {
  return train::is_better(mode_, value + (mode_ == Mode::max ? -options_.min_delta : options_.min_delta), than);
}

// Follows keras.callbacks.EarlyStopping: an improvement resets the patience only when it also beats the baseline.
void EarlyStopping::on_epoch_end(int epoch, const Logs& logs) {
  if (epoch < options_.start_from_epoch) return;
  const auto found = train::monitored("EarlyStopping", options_.monitor, logs);
  if (!found) return;
  const double value = *found;
  if (options_.restore_best_weights && !best_weights_) {
    model().module().trackable().save(best_weights_.emplace(), "");
    best_epoch_ = epoch;
  }
  ++wait_;
  if (!best_ || better(value, *best_)) {
    best_ = value;
    best_epoch_ = epoch;
    if (options_.restore_best_weights) model().module().trackable().save(best_weights_.emplace(), "");
    if (!options_.baseline || better(value, *options_.baseline)) wait_ = 0;
    return;
  }
  if (wait_ >= options_.patience && epoch > 0) {
    stopped_epoch_ = epoch;
    model().stop_training();
  }
}

void EarlyStopping::on_train_end() {
  if (stopped_epoch_ >= 0) log_info(text("epoch ", stopped_epoch_ + 1, ": early stopping"));
  auto& state = unwrap(model()).state;
  if (best_weights_) state.load_weights(state.from_chief(*best_weights_));
}

void EarlyStopping::save(Archive& archive, const std::string& prefix) const {
  archive.entries[prefix + "/wait"] = std::to_string(wait_);
  archive.entries[prefix + "/best_epoch"] = std::to_string(best_epoch_);
  archive.entries[prefix + "/stopped_epoch"] = std::to_string(stopped_epoch_);
  if (best_) archive.set_numbers(prefix + "/best", {*best_});
  if (!best_weights_) return;
  for (const auto& [name, tensor] : best_weights_->tensors) archive.tensors[prefix + "/weights/" + name] = tensor;
}

std::function<void()> EarlyStopping::load(const Archive& archive, const std::string& prefix) {
  auto loaded = *this;
  loaded.wait_ = static_cast<int>(archive.integer(prefix + "/wait"));
  loaded.best_epoch_ = static_cast<int>(archive.integer(prefix + "/best_epoch"));
  loaded.stopped_epoch_ = static_cast<int>(archive.integer(prefix + "/stopped_epoch"));
  if (archive.entries.contains(prefix + "/best")) loaded.best_ = archive.number(prefix + "/best");
  const auto weights = prefix + "/weights/";
  for (const auto& [name, tensor] : archive.tensors) {
    if (!name.starts_with(weights)) continue;
    if (!loaded.best_weights_) loaded.best_weights_.emplace();
    loaded.best_weights_->tensors[name.substr(weights.size())] = tensor;
  }
  if (loaded.best_weights_) train::check_weights(*loaded.best_weights_, unwrap(model().module()));
  return [this, loaded = std::move(loaded)] { *this = loaded; };
}

}  // namespace lockstep
