#include "front_ends/estimator/checkpoint_saver.h"

#include <algorithm>
#include <filesystem>

#include "base/log.h"
#include "base/text.h"
#include "train/model_impl.h"

namespace lockstep::estimator {
namespace {

// Steps between checks of the time where several workers must agree on it.
constexpr std::int64_t kStepsBetweenLooks = 100;

double seconds_since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

}  // namespace

void CheckpointSaver::on_train_begin() {
  const auto& workers = unwrap(model()).topology.all;
  const auto latest = workers.broadcast(workers.rank() == 0 ? latest_checkpoint(config_.model_dir) : "");
  if (!latest.empty()) {
    model().load_checkpoint(latest);
    saved_ = model().iterations();
    if (std::find(kept_.begin(), kept_.end(), latest) == kept_.end())
      kept_.push_back(latest);  // a checkpoint's own list does not name it
    if (workers.rank() == 0) log_info(text("going on from ", latest, ", step ", saved_));
  }
  begin_ = -1;
  saved_at_ = Clock::now();
  if (workers.rank() == 0 && config_.save_summary_steps > 0) events_.emplace(config_.model_dir);
}

// The step is read here and not in on_train_begin, in which other hooks may change it: Horovod's broadcast does.
void CheckpointSaver::on_epoch_begin(int /*epoch*/) {
  if (begin_ >= 0) return;
  begin_ = told_ = model().iterations();
  told_at_ = Clock::now();
}

// Saves the first checkpoint here, so that it includes what other hooks changed in on_train_begin.
void CheckpointSaver::on_train_batch_begin(std::int64_t /*batch*/) {
  if (saved_ < 0) save();
}

void CheckpointSaver::on_train_batch_end(std::int64_t /*batch*/, const Logs& /*logs*/) {
  tell();
  // A step that ends the fit is saved here, before fit moves on to the next epoch.
  if (!save_is_due() && !unwrap(model()).stops()) return;
  save();
  if (after_save_) after_save_();
}

void CheckpointSaver::on_epoch_end(int /*epoch*/, const Logs& /*logs*/) {
  // Training ends with the data, unless no step was made: the checkpoint was at the end of the data, which then begin
  // again.
  if (model().iterations() > begin_) model().stop_training();
}

void CheckpointSaver::on_train_end() {
  events_.reset();
  if (saved_ == model().iterations()) return;
  save();
  if (after_save_) after_save_();
}

void CheckpointSaver::save() {
  saved_ = model().iterations();
  saved_at_ = Clock::now();
  const auto path = (std::filesystem::path(config_.model_dir) / text("model.ckpt-", saved_)).string();
  auto& impl = unwrap(model());
  impl.lead->write({.path = path});
  impl.topology.all.run_on_rank_0([&] {
    record_checkpoint(path, kept_, config_.keep_checkpoint_max);
    log_info(text("saved ", path));
  });
}

bool CheckpointSaver::save_is_due() const {
  const auto step = model().iterations();
  if (config_.save_checkpoints_steps > 0) return step - saved_ >= config_.save_checkpoints_steps;
  const auto& workers = unwrap(model()).topology.all;
  const bool due = seconds_since(saved_at_) >= config_.save_checkpoints_secs;
  if (workers.size() == 1) return due;
  return step % kStepsBetweenLooks == 0 && workers.broadcast(due ? "due" : "") == "due";
}

void CheckpointSaver::tell() {
  if (!model().strategy().is_chief()) return;
  const auto step = model().iterations();
  const double loss = unwrap(model()).state.tracker->batch_loss();
  if (events_ && step % config_.save_summary_steps == 0) events_->scalar("loss", step, loss);
  if (config_.log_step_count_steps == 0 || step % config_.log_step_count_steps != 0) return;
  const double rate = static_cast<double>(step - told_) / seconds_since(told_at_);
  log_info(text("loss = ", loss, ", step = ", step, " (", rate, " steps/s)"));
  if (events_) events_->scalar("global_step/sec", step, rate);
  told_ = step;
  told_at_ = Clock::now();
}

void CheckpointSaver::save(Archive& archive, const std::string& prefix) const {
  save_kept(kept_, config_.model_dir, archive, prefix + "/kept");
}

std::function<void()> CheckpointSaver::load(const Archive& archive, const std::string& prefix) {
  return [this, kept = load_kept(archive, prefix + "/kept", config_.model_dir)] { kept_ = kept; };
}

}  // namespace lockstep::estimator
