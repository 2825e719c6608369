// ModelCheckpoint and BackupAndRestore.
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <regex>

#include "base/text.h"
#include "lockstep/callbacks.h"
#include "lockstep/error.h"
#include "lockstep/model.h"
#include "strategy/strategy_impl.h"
#include "train/callbacks/monitor.h"
#include "train/numbers.h"

namespace lockstep {
namespace {

void require_not_negative(const char* what, std::int64_t value) {
  if (value < 0) throw InvalidArgument(text(what, " is ", value, "; it must be 0 or more"));
}

// `value` in Python's format `spec`: a number such as 02d or .2f, or nothing.
std::string formatted(double value, const std::string& spec, const std::string& whole) {
  const bool integer = spec.empty() ? value == std::floor(value) : spec.back() == 'd';
  static const std::regex kFormat("0?[0-9]*d|0?[0-9]*(\\.[0-9]+)?[feg]");
  if (!spec.empty() && !std::regex_match(spec, kFormat))
    throw InvalidArgument(
        text("ModelCheckpoint: \"", spec, "\" in ", whole, " is no format; such as {epoch:02d} or {loss:.2f} are"));
  std::string pattern = "%" + spec;
  if (spec.empty()) pattern += integer ? "d" : "g";
  if (integer) pattern.insert(pattern.size() - 1, "ll");
  std::array<char, 64> buffer{};
  if (integer) {
    std::snprintf(buffer.data(), buffer.size(), pattern.c_str(), std::llround(value));
  } else {
    std::snprintf(buffer.data(), buffer.size(), pattern.c_str(), value);
  }
  return buffer.data();
}

// Replaces each {name} and {name:format}.
std::string fill_in(const std::string& path, const Logs& values) {
  std::string result;
  for (std::size_t at = 0; at < path.size(); ++at) {
    const auto end = path[at] == '{' ? path.find('}', at) : std::string::npos;
    if (end == std::string::npos) {
      result.push_back(path[at]);
      continue;
    }
    const auto inside = path.substr(at + 1, end - at - 1);
    const auto colon = inside.find(':');
    const auto name = inside.substr(0, colon);
    result += formatted(values[name], colon == std::string::npos ? "" : inside.substr(colon + 1), path);
    at = end;
  }
  return result;
}

// The innermost folder of the path that is the same for all checkpoints.
std::string fixed_folder_of(const std::string& filepath) {
  const auto folder = std::filesystem::path(filepath.substr(0, filepath.find('{'))).parent_path();
  return folder.empty() ? "." : folder.string();
}

}  // namespace

ModelCheckpoint::ModelCheckpoint(std::string filepath, ModelCheckpointOptions options)
    : filepath_(std::move(filepath)), options_(std::move(options)) {
  require_not_negative("ModelCheckpoint: save_freq", options_.save_freq);
  require_not_negative("ModelCheckpoint: max_to_keep", options_.max_to_keep);
}

void ModelCheckpoint::on_train_batch_end(std::int64_t batch, const Logs& logs) {
  batch_ = batch;
  logs_ = logs;
  if (options_.save_freq == 0 || ++since_save_ < options_.save_freq) return;
  since_save_ = 0;
  if (!options_.save_best_only || improves(logs)) save_model(batch, logs);
}

void ModelCheckpoint::on_epoch_end(int, const Logs& logs) {
  if (options_.save_freq > 0) return;
  if (!options_.save_best_only || improves(logs)) save_model(batch_, logs);
}

void ModelCheckpoint::on_interrupt() {
  if (!options_.save_best_only) save_model(batch_, logs_);
}

bool ModelCheckpoint::improves(const Logs& logs) {
  const auto value = monitored("ModelCheckpoint", options_.monitor, logs);
  if (!value || (best_ && !is_better(options_.mode, options_.monitor, *value, *best_))) return false;
  best_ = value;
  return true;
}

void ModelCheckpoint::save_model(std::int64_t batch, const Logs& logs) {
  Logs values = logs;
  values.set("epoch", epoch_ + 1);
  values.set("batch", static_cast<double>(batch + 1));
  const auto path = fill_in(filepath_, values);
  if (options_.save_weights_only) {
    model().save_weights(path);
  } else {
    model().save_checkpoint(path);
  }
  if (model().strategy().is_chief()) record_checkpoint(path, kept_, options_.max_to_keep);
}

void ModelCheckpoint::save(Archive& archive, const std::string& prefix) const {
  if (best_) archive.entries[prefix + "/best"] = print_numbers({*best_});
  archive.entries[prefix + "/since_save"] = std::to_string(since_save_);
  save_kept(kept_, fixed_folder_of(filepath_), archive, prefix + "/kept");
}

void ModelCheckpoint::load(const Archive& archive, const std::string& prefix) {
  const auto best = archive.entries.find(prefix + "/best");
  if (best != archive.entries.end()) best_ = parse_numbers(best->second).at(0);
  const auto since = archive.entries.find(prefix + "/since_save");
  if (since != archive.entries.end()) since_save_ = std::stoll(since->second);
  kept_ = load_kept(archive, prefix + "/kept", fixed_folder_of(filepath_));
}

BackupAndRestore::BackupAndRestore(std::string backup_dir, BackupAndRestoreOptions options)
    : file_((std::filesystem::path(std::move(backup_dir)) / "backup").string()), options_(options) {
  require_not_negative("BackupAndRestore: save_freq", options_.save_freq);
}

void BackupAndRestore::on_train_begin() {
  const auto& workers = model().strategy().impl().workers();
  const bool there = std::filesystem::exists(checkpoint_file(file_));
  if (workers.share(there ? "there" : "") == "there") model().load_checkpoint(file_);
}

void BackupAndRestore::on_train_batch_end(std::int64_t batch, const Logs&) {
  if (options_.save_freq > 0 && (batch + 1) % options_.save_freq == 0) model().save_checkpoint(file_);
}

void BackupAndRestore::on_epoch_end(int, const Logs&) { model().save_checkpoint(file_); }
void BackupAndRestore::on_interrupt() { model().save_checkpoint(file_); }

void BackupAndRestore::on_train_end() {
  if (options_.delete_checkpoint && model().strategy().is_chief()) std::filesystem::remove(checkpoint_file(file_));
}

}  // namespace lockstep
