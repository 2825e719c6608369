// ModelCheckpoint and BackupAndRestore.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/atomic_file.h"
#include "checkpoint/files.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/own_files.h"
#include "checkpoint/remove_at_success.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/train/model.h"
#include "lockstep/train/saving_callbacks.h"
#include "train/callbacks/background_save.h"
#include "train/callbacks/file_pattern.h"
#include "train/callbacks/monitor.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

// After a restart, processes of the job that was killed may still hold the lock.
constexpr std::chrono::seconds kForOneThatEnds(2);

// Returns how long a fit that throws waits for the others' parts of a checkpoint: not at all where the others go on,
// and write another one.
std::chrono::seconds for_other_workers(const Model& model) {
  return std::chrono::seconds(unwrap(model.strategy()).is_elastic() ? 0 : 10);
}

constexpr const char* kPart = ".part";  // after the name of a file that is not whole yet

void require_not_negative(const char* what, std::int64_t value) {
  if (value < 0) throw InvalidArgument(text(what, " is ", value, "; it must be 0 or more"));
}

void require_no_servers(const char* callback, bool background, const Model& model) {
  if (!background || !unwrap(model).lead->has_servers_checkpoints()) return;
  throw InvalidArgument(text(callback,
                             ": background is not for strategies with parameter servers, which write a "
                             "checkpoint without stopping the steps anyway"));
}

// Returns a name that is free. An earlier damaged backup of Lockstep's makes room for this one.
std::string place_for_damaged(const std::string& folder) {
  for (int number = 1;; ++number) {
    const auto name = number == 1 ? "backup-damaged" : text("backup-damaged-", number);
    const auto place = checkpoint_file((std::filesystem::path(folder) / name).string());
    if (checkpoint::is_own_archive(std::filesystem::path(place))) checkpoint::remove_own_archive(place);
    if (!checkpoint::is_taken(place)) return place;
  }
}

// Renames a spare that a crash of the host has damaged, and that no load needs.
void put_aside(const std::string& folder, const std::string& spare) {
  const auto damaged = place_for_damaged(folder);
  checkpoint::rename_file(spare, damaged);
  log_warning(
      text("BackupAndRestore: ", spare, " is no file that Lockstep wrote, or was damaged: it is ", damaged, " now"));
}

// Returns why act() failed; empty where it did not.
std::string done_or_why(const char* callback, const auto& act) {
  try {
    act();
    return {};
  } catch (const IoError& error) {  // thrown on all workers
    return text(callback, ": ", error.what());
  }
}

// Saves, called by all workers. Where the chief is lost meanwhile, the next chief saves. Returns as done_or_why.
std::string saved_or_why(const Model& model, const char* callback, const auto& save) {
  std::string problem;
  unwrap(model).on_all_in_section(callback, [&] { problem = done_or_why(callback, save); });
  return problem;
}

void warn_of_lost(const Model& model, const char* callback, const std::string& path) {
  if (!model.strategy().is_chief()) return;
  log_warning(text(callback, ": ", path, " was not whole when the workers changed: it is made again, of this step"));
}

// Where the disk is full, or is gone, training goes on without this checkpoint.
void warn_of(const Model& model, const std::string& problem) {
  if (!problem.empty() && model.strategy().is_chief())
    log_warning(problem + "; training goes on without this checkpoint");
}

std::string save_or_warn(const Model& model, const char* callback, const auto& save) {
  auto problem = saved_or_why(model, callback, save);
  warn_of(model, problem);
  return problem;
}

}  // namespace

ModelCheckpoint::ModelCheckpoint(std::string filepath, ModelCheckpointOptions options)
    : filepath_(std::move(filepath)), options_(std::move(options)), background_(std::make_shared<BackgroundSave>()) {
  require_not_negative("ModelCheckpoint: save_freq", options_.save_freq);
  require_not_negative("ModelCheckpoint: max_to_keep", options_.max_to_keep);
}

void ModelCheckpoint::on_train_begin() {
  auto& impl = unwrap(model());
  if (options_.save_best_only) mode_ = train::resolved("ModelCheckpoint", options_.mode, options_.monitor, model());
  std::vector<std::string> names{"epoch", "batch"};
  for (const auto& [name, value] : impl.tracker->logs()) {
    names.push_back(name);
    if (plan().validates && options_.save_freq == 0) names.push_back("val_" + name);
  }
  // A callback of the user's may add logs of its own.
  const bool known = std::all_of(impl.callbacks.begin(), impl.callbacks.end(), [](const AnyCallback& callback) {
    return train::name_of_type(*callback.operator->()).starts_with("lockstep::");
  });
  train::fill_in(filepath_, [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) != names.end()) return 0.0;
    if (!known && !name.starts_with("val_")) return 0.0;
    const char* const why = plan().validates || !name.starts_with("val_") ? "" : " (this fit has no validation_data)";
    throw InvalidArgument(
        text("ModelCheckpoint: no log is called {", name, "} as in ", filepath_, why, "; there are ", join(names)));
  });
  require_no_servers("ModelCheckpoint", options_.background, model());
  background_->start(impl);
  const auto require_folder = [&] {
    const auto folder = train::fixed_folder_of(filepath_);
    checkpoint::require_writable_folder(folder);
    checkpoint::require_index_or_nothing(std::filesystem::path(folder) / "checkpoint");
  };
  impl.on_all_in_section("ModelCheckpoint", [&] { impl.topology.all.run_on_rank_0(require_folder); });
}

void ModelCheckpoint::on_train_batch_end(std::int64_t batch, const Logs& logs) {
  batch_ = batch;
  logs_ = logs;
  if (background_->is_lost(unwrap(model()))) make_again();
  since_save_ += unwrap(model()).batches_of_call;
  if (options_.save_freq == 0 || since_save_ < options_.save_freq) return;
  since_save_ = 0;
  if (!options_.save_best_only || improves(logs)) save_model(batch, logs);
}

void ModelCheckpoint::on_epoch_end(int, const Logs& logs) {
  if (options_.save_freq > 0) return;
  if (!options_.save_best_only || improves(logs)) save_model(batch_, logs);
}

void ModelCheckpoint::on_interrupt() {
  if (!options_.save_best_only) save_model(batch_, logs_);
  if (options_.background) finish_writing();
}

bool ModelCheckpoint::improves(const Logs& logs) {
  const auto value = train::monitored("ModelCheckpoint", options_.monitor, logs);
  if (!value || (best_ && !train::is_better(mode_, *value, *best_))) return false;
  best_ = value;
  return true;
}

void ModelCheckpoint::save_model(std::int64_t batch, const Logs& logs) {
  const auto path = train::fill_in(filepath_, [&](const std::string& name) {
    if (name == "epoch") return epoch_ + 1.0;
    if (name == "batch") return static_cast<double>(batch + 1);
    return logs.contains(name) ? logs[name] : std::nan("");  // no validation in this epoch, or interrupted before
  });
  auto& impl = unwrap(model());
  if (options_.background) {
    finish_writing();
    begin_to_write(path);
    return;
  }
  problem_ = save_or_warn(model(), "ModelCheckpoint", [&] {
    options_.save_weights_only ? impl.write_weights(path) : impl.lead->write_checkpoint(path);
    auto kept = kept_;
    impl.topology.all.run_on_rank_0([&] { record_checkpoint(path, kept, options_.max_to_keep); });
  });
  if (problem_.empty()) keep_checkpoint(path, kept_, options_.max_to_keep);
}

void ModelCheckpoint::begin_to_write(const std::string& path) {
  std::erase(kept_, path);  // where it is written again
  const auto record = [path, kept = kept_, max = options_.max_to_keep](const std::function<void()>& write) mutable {
    write();
    record_checkpoint(path, kept, max);
  };
  written_ = path;
  problem_ = save_or_warn(model(), "ModelCheckpoint", [&] {
    background_->begin(unwrap(model()), {.path = path, .weights_only = options_.save_weights_only, .around = record});
  });
  keep_checkpoint(path, kept_, options_.max_to_keep);
}

void ModelCheckpoint::finish_writing() {
  auto& impl = unwrap(model());
  for (bool lost = true; lost;) {
    const bool pending = background_->is_pending();  // else problem_ is of a save that could not begin
    const auto problem = save_or_warn(model(), "ModelCheckpoint", [&] { background_->finish(impl); });
    if (pending) problem_ = problem;
    lost = background_->was_lost(impl);
    if (lost) make_again();
  }
}

void ModelCheckpoint::make_again() {
  warn_of_lost(model(), "ModelCheckpoint", written_);
  begin_to_write(written_);
}

void ModelCheckpoint::detach() noexcept { background_->give_up(for_other_workers(model())); }

void ModelCheckpoint::on_train_end() {
  if (options_.background) finish_writing();
  if (!problem_.empty()) throw IoError(std::exchange(problem_, ""));
}

void ModelCheckpoint::save(Archive& archive, const std::string& prefix) const {
  if (best_) archive.set_numbers(prefix + "/best", {*best_});
  archive.entries[prefix + "/since_save"] = std::to_string(since_save_);
  save_kept(kept_, train::fixed_folder_of(filepath_), archive, prefix + "/kept");
}

std::function<void()> ModelCheckpoint::load(const Archive& archive, const std::string& prefix) {
  std::optional<double> best;
  if (archive.entries.contains(prefix + "/best")) best = archive.number(prefix + "/best");
  return [this, best, since_save = archive.integer(prefix + "/since_save"),
          kept = load_kept(archive, prefix + "/kept", train::fixed_folder_of(filepath_))] {
    best_ = best;
    since_save_ = since_save;
    kept_ = kept;
  };
}

BackupAndRestore::BackupAndRestore(std::string backup_dir, BackupAndRestoreOptions options)
    : folder_(std::move(backup_dir)),
      file_(checkpoint_file((std::filesystem::path(folder_) / "backup").string())),
      previous_(checkpoint_file((std::filesystem::path(folder_) / "backup-previous").string())),
      options_(options),
      background_(std::make_shared<BackgroundSave>()) {
  require_not_negative("BackupAndRestore: save_freq", options_.save_freq);
}

void BackupAndRestore::on_train_begin() {
  auto& impl = unwrap(model());
  require_no_servers("BackupAndRestore", options_.background, model());
  background_->start(impl);
  const auto look = [&] {
    impl.topology.all.run_on_rank_0([&] { take_folder(); });
    return ModelImpl::Numbers{is_there() ? 1.0 : 0.0};
  };
  if (impl.in_section("BackupAndRestore", look).front() == 0) {
    if (impl.lead->has_servers_checkpoints()) model().save_checkpoint(file_);  // for servers that are started again
    return;
  }
  load_last_whole([this] { model().load_checkpoint(file_); });
  if (!model().strategy().is_chief()) return;
  const bool at_end = impl.stopping || impl.progress.epoch >= plan().epochs;
  if (!at_end) {
    return log_info(text("BackupAndRestore: fit goes on from ", file_, ", in epoch ", impl.progress.epoch + 1,
                         " after ", impl.progress.batch, " steps"));
  }
  log_warning(text("BackupAndRestore: ", file_, " was trained to the end (", impl.progress.epoch, " of ", plan().epochs,
                   " epochs", impl.stopping ? ", when a callback stopped it" : "",
                   "): fit only restores it. To train anew, remove that file"));
}

// The next chief takes the folder again where a worker is lost meanwhile.
void BackupAndRestore::take_folder() {
  const bool done_here = checkpoint::keep_at_success(file_);
  checkpoint::keep_at_success(previous_);
  lock_.reset();
  lock_ = std::make_shared<FolderLock>(folder_, "backup.lock", Deadline::after(kForOneThatEnds));
  checkpoint::remove_left_overs(checkpoint::absolute_path(file_));
  for (const auto& place : {previous_, previous_ + kPart, file_ + kPart}) {
    if (checkpoint::is_damaged_archive(place)) put_aside(folder_, place);
    checkpoint::require_own_archive_or_nothing(place);
  }
  if (!done_here) return;
  checkpoint::remove_checkpoint(file_);  // left by an earlier fit of this program
  checkpoint::remove_checkpoint(previous_);
}

bool BackupAndRestore::is_there() const {
  const auto& workers = unwrap(model()).topology.all;
  return workers.any(workers.rank() == 0 && checkpoint::file_exists(file_));
}

std::function<void()> BackupAndRestore::on_state_lost() {
  auto& impl = unwrap(model());
  background_->give_up(std::chrono::seconds(0));
  if (!is_there()) return nullptr;
  std::function<void()> change;
  load_last_whole([&] { change = impl.change_to(ModelImpl::parse_read(file_, impl.read_on_all(file_))); });
  return change;
}

// Loads the last backup; where it is damaged, the one before it.
void BackupAndRestore::load_last_whole(const std::function<void()>& load) {
  std::string problem;
  try {
    return load();
  } catch (const DataError& error) {  // thrown on all workers alike
    problem = error.what();
  }
  take_one_before(problem);
  load();
}

// Makes the one before the last backup.
void BackupAndRestore::take_one_before(const std::string& problem) {
  auto& impl = unwrap(model());
  const auto take = [&] {
    if (!checkpoint::file_exists(previous_)) throw DataError(problem);
    const auto damaged = place_for_damaged(folder_);
    log_warning(text("BackupAndRestore: ", problem, "; fit takes the backup before it. The damaged one is ", damaged));
    const auto part = file_ + kPart;
    checkpoint::remove_own_archive(part);  // of a process that was killed
    checkpoint::link_or_copy(file_, damaged);
    checkpoint::link_or_copy(previous_, part);
    checkpoint::rename_file(part, file_);
  };
  impl.on_all_in_section("BackupAndRestore", [&] { impl.topology.all.run_on_rank_0(take); });
}

void BackupAndRestore::back_up(bool in_background) {
  auto& impl = unwrap(model());
  warn_of(model(), done_or_why("BackupAndRestore", [&] { background_->finish(impl); }));
  write_backup(in_background);
}

void BackupAndRestore::write_backup(bool in_background) {
  auto& impl = unwrap(model());
  if (impl.lead->has_servers_checkpoints()) return impl.lead->write_checkpoint(file_);
  const auto keep_previous = [file = file_, previous = previous_](const std::function<void()>& write) {
    const auto kept = previous + kPart;
    checkpoint::remove_own_archive(kept);  // of a process that was killed
    if (checkpoint::file_exists(file)) checkpoint::link_or_copy(file, kept);
    try {
      write();
    } catch (...) {
      checkpoint::remove_own_archive(kept);
      throw;
    }
    if (checkpoint::file_exists(kept)) checkpoint::rename_file(kept, previous);
    checkpoint::remove_rows(file);  // of a checkpoint that was made with parameter servers
  };
  if (in_background) return background_->begin(impl, {.path = file_, .around = keep_previous});
  const auto archive = impl.save_state();
  impl.topology.all.run_on_rank_0([&] { keep_previous([&] { write_archive(file_, archive); }); });
}

void BackupAndRestore::save(Archive& archive, const std::string& prefix) const {
  const auto& impl = unwrap(model());
  archive.entries[prefix + "/stopping"] = (impl.stopping || impl.agreed_to_stop) && !impl.out_of_data ? "1" : "0";
}

// A request to stop training holds after a restart too.
std::function<void()> BackupAndRestore::load(const Archive& archive, const std::string& prefix) {
  return [this, stopping = archive.integer(prefix + "/stopping") != 0] { unwrap(model()).stopping = stopping; };
}

void BackupAndRestore::on_join() { background_->start(unwrap(model())); }

void BackupAndRestore::on_train_batch_end(std::int64_t batch, const Logs&) {
  if (background_->is_lost(unwrap(model()))) {
    warn_of_lost(model(), "BackupAndRestore", file_);
    save_or_warn(model(), "BackupAndRestore", [this] { back_up(/*in_background=*/true); });
  }
  if (!unwrap(model()).passed_multiple(batch + 1, options_.save_freq)) return;
  save_or_warn(model(), "BackupAndRestore", [this] { back_up(options_.background); });
}

void BackupAndRestore::on_epoch_end(int, const Logs&) {
  save_or_warn(model(), "BackupAndRestore", [this] { back_up(options_.background); });
}

void BackupAndRestore::on_interrupt() {
  auto& impl = unwrap(model());
  save_or_warn(model(), "BackupAndRestore", [&] { background_->finish(impl); });
  write_backup(/*in_background=*/false);
}

void BackupAndRestore::detach() noexcept {
  background_->give_up(for_other_workers(model()));
  lock_.reset();
}

void BackupAndRestore::on_train_end() {
  // Saves what other callbacks changed at the end, too.
  const auto problem = saved_or_why(model(), "BackupAndRestore", [this] { back_up(); });
  if (!problem.empty()) throw IoError(problem);
  if (!options_.delete_checkpoint || !model().strategy().is_chief()) return;
  checkpoint::remove_at_success(file_, lock_);
  checkpoint::remove_at_success(previous_, lock_);
}

}  // namespace lockstep
