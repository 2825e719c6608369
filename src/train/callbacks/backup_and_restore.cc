#include <cmath>
#include <filesystem>
#include <utility>

#include "checkpoint/files.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/own_files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/train/model.h"
#include "lockstep/train/saving_callbacks.h"
#include "train/callbacks/background_save.h"
#include "train/callbacks/saving.h"

namespace lockstep {
namespace {

// After a restart, processes of the job that was killed may still hold the lock.
constexpr std::chrono::seconds kForOneThatEnds(2);

constexpr const char* kPart = ".part";  // after the name of a file that is not whole yet

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

}  // namespace

BackupAndRestore::BackupAndRestore(std::string backup_dir, BackupAndRestoreOptions options)
    : folder_(std::move(backup_dir)),
      file_(checkpoint_file((std::filesystem::path(folder_) / "backup").string())),
      previous_(checkpoint_file((std::filesystem::path(folder_) / "backup-previous").string())),
      options_(options),
      background_(std::make_shared<BackgroundSave>()) {
  require(options_.save_freq >= 0, "BackupAndRestore: save_freq", options_.save_freq, "0 or more");
}

void BackupAndRestore::on_train_begin() {
  auto& impl = unwrap(model());
  if (options_.background) impl.lead->require_background("BackupAndRestore");
  background_->start(impl);
  const auto look = [&] {
    impl.topology.all.run_on_rank_0([&] { take_folder(); });
    return ModelImpl::Numbers{is_there() ? 1.0 : 0.0};
  };
  if (impl.in_section("BackupAndRestore", look).front() == 0) return impl.lead->write_first_backup(file_);
  load_last_whole([&] { impl.lead->load_checkpoint(file_); });
  if (!model().strategy().is_chief()) return;
  const bool at_end = impl.fit.stopping || impl.state.progress.epoch >= plan().epochs;
  if (!at_end) {
    return log_info(text("BackupAndRestore: fit goes on from ", file_, ", in epoch ", impl.state.progress.epoch + 1,
                         " after ", impl.state.progress.batch, " steps"));
  }
  log_warning(text("BackupAndRestore: ", file_, " was trained to the end (", impl.state.progress.epoch, " of ",
                   plan().epochs, " epochs", impl.fit.stopping ? ", when a callback stopped it" : "",
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
  background_->give_up(std::chrono::seconds(0));
  if (!is_there()) return nullptr;
  std::function<void()> change;
  load_last_whole([&] { change = unwrap(model()).state.read_all(file_); });
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
  bool taken = false;  // the section is repeated where another worker is lost meanwhile
  const auto take = [&] {
    if (taken) return;
    if (!checkpoint::file_exists(previous_)) throw DataError(problem);
    const auto damaged = place_for_damaged(folder_);
    log_warning(text("BackupAndRestore: ", problem, "; fit takes the backup before it. The damaged one is ", damaged));
    const auto part = file_ + kPart;
    checkpoint::remove_own_archive(part);  // of a process that was killed
    checkpoint::link_or_copy(file_, damaged);
    checkpoint::link_or_copy(previous_, part);
    checkpoint::rename_file(part, file_);
    taken = true;
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
  };
  const train::StateFile backup{.path = file_, .around = keep_previous};
  in_background ? background_->begin(impl, backup) : impl.lead->write(backup);
}

void BackupAndRestore::save(Archive& archive, const std::string& prefix) const {
  const auto& impl = unwrap(model());
  archive.entries[prefix + "/stopping"] =
      (impl.fit.stopping || impl.fit.agreed_to_stop) && !impl.fit.out_of_data ? "1" : "0";
}

// A request to stop training holds after a restart too.
std::function<void()> BackupAndRestore::load(const Archive& archive, const std::string& prefix) {
  return [this, stopping = archive.integer(prefix + "/stopping") != 0] { unwrap(model()).fit.stopping = stopping; };
}

void BackupAndRestore::on_join() { background_->start(unwrap(model())); }

void BackupAndRestore::on_train_batch_end(std::int64_t batch, const Logs&) {
  if (background_->is_lost(unwrap(model()))) {
    prepare_again(model(), "BackupAndRestore", file_);
    save_or_warn(model(), "BackupAndRestore", [this] { back_up(/*in_background=*/true); });
  }
  if (!unwrap(model()).fit.passed_multiple(batch + 1, options_.save_freq)) return;
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
