// TensorFlow's index file `checkpoint`, and Checkpoint and CheckpointManager on top of it.
#include "lockstep/checkpoint/checkpoint.h"

#include <filesystem>
#include <optional>
#include <sstream>

#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/own_files.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/sharded_archive.h"
#include "checkpoint/state.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// The contents of the text file `checkpoint`: names relative to its folder, oldest first, the latest included.
struct CheckpointIndex {
  std::string latest;
  std::vector<std::string> all;
};

// The value of `key: "value"`, or nothing. TensorFlow writes text protobuf; backslash escapes quotes and backslashes.
bool parse_line(const std::string& line, const std::string& key, std::string& value) {
  if (!line.starts_with(key + ": \"") || line.back() != '"') return false;
  value.clear();
  for (std::size_t i = key.size() + 3; i + 1 < line.size(); ++i) {
    if (line[i] == '\\' && i + 2 < line.size()) ++i;
    value.push_back(line[i]);
  }
  return true;
}

std::string quoted(const std::string& value) {
  std::string result = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') result.push_back('\\');
    result.push_back(c);
  }
  return result + '"';
}

// The wait for another job that records a checkpoint into this folder; a job needs far less.
constexpr std::chrono::seconds kForIndex(30);

fs::path index_file(const fs::path& directory) { return directory / "checkpoint"; }

CheckpointIndex read_index(const fs::path& directory) {
  CheckpointIndex index;
  if (!checkpoint::file_exists(index_file(directory))) return index;
  std::istringstream lines(read_small_file(index_file(directory).string(), checkpoint::kLongestIndex));
  std::string value;
  for (std::string line; std::getline(lines, line);) {
    const bool latest = parse_line(line, "model_checkpoint_path", value);
    if (!latest && !parse_line(line, "all_model_checkpoint_paths", value)) continue;
    if (checkpoint::path_inside(directory, value).empty()) continue;  // not of this folder
    if (latest) index.latest = value;
    if (!latest) index.all.push_back(value);
  }
  return index;
}

void write_index(const fs::path& directory, const CheckpointIndex& index) {
  std::string lines = text("model_checkpoint_path: ", quoted(index.latest), "\n");
  for (const auto& path : index.all) lines += text("all_model_checkpoint_paths: ", quoted(path), "\n");
  const auto part = std::as_bytes(std::span(lines));
  checkpoint::write_file_atomically(index_file(directory).string(), std::span(&part, 1));
}

// Says why the checkpoint cannot be restored; empty where it is whole.
std::string problem_of(const std::string& path) {
  const auto file = checkpoint_file(path);
  if (!checkpoint::file_exists(file)) return "it is not there";
  try {
    checkpoint::survey(path);
    return {};
  } catch (const DataError& error) {
    return error.what();
  }
}

fs::path folder_of(const std::string& path) {
  const auto folder = fs::path(path).parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

}  // namespace

std::string latest_checkpoint(const std::string& directory) {
  const auto index = read_index(directory);
  std::vector<std::string> names(index.all.rbegin(), index.all.rend());
  std::erase(names, index.latest);
  if (!index.latest.empty()) names.insert(names.begin(), index.latest);
  std::string problem;  // of the latest
  for (const auto& name : names) {
    const auto path = (fs::path(directory) / name).string();
    const auto why = problem_of(path);
    if (why.empty() && !problem.empty()) {
      log_warning(text("the latest checkpoint in ", directory, ", ", index.latest, ", cannot be restored (", problem,
                       "); taking ", name));
    }
    if (why.empty()) return path;
    if (problem.empty()) problem = why;
  }
  return {};
}

void save_kept(const std::vector<std::string>& kept, const std::string& folder, Archive& archive,
               const std::string& prefix) {
  for (std::size_t i = 0; i < kept.size(); ++i) {
    archive.entries[text(prefix, "/", i)] = fs::path(kept[i]).lexically_relative(folder).string();
  }
}

std::vector<std::string> load_kept(const Archive& archive, const std::string& prefix, const std::string& folder) {
  std::vector<std::string> kept;
  for (std::size_t i = 0;; ++i) {
    const auto found = archive.entries.find(text(prefix, "/", i));
    if (found == archive.entries.end()) return kept;
    const auto place = checkpoint::path_inside(folder, found->second);
    if (!place.empty()) kept.push_back(place.string());
  }
}

std::vector<std::string> keep_checkpoint(const std::string& path, std::vector<std::string>& kept, int max_to_keep) {
  std::vector<std::string> dropped;
  std::erase(kept, path);
  kept.push_back(path);
  if (max_to_keep > 0 && kept.size() > static_cast<std::size_t>(max_to_keep)) {
    dropped.assign(kept.begin(), kept.end() - max_to_keep);
    kept.erase(kept.begin(), kept.end() - max_to_keep);
  }
  return dropped;
}

void record_checkpoint(const std::string& path, std::vector<std::string>& kept, int max_to_keep) {
  const auto dropped = keep_checkpoint(path, kept, max_to_keep);
  const auto folder = folder_of(path);
  const auto name_of = [](const std::string& saved) { return fs::path(saved).filename().string(); };
  const FolderLock lock(folder.string(), "checkpoint.lock", Deadline::after(kForIndex));
  checkpoint::require_index_or_nothing(index_file(folder));
  auto index = read_index(folder);
  index.latest = name_of(path);
  std::erase(index.all, index.latest);
  for (const auto& old : dropped) std::erase(index.all, name_of(old));
  index.all.push_back(index.latest);
  write_index(folder, index);
  for (const auto& old : dropped) {
    std::error_code ignored;  // another process may have removed the files first
    checkpoint::remove_checkpoint(old, ignored);
  }
}

Trackable track(std::int64_t& counter) {
  return {
      [&counter](Archive& archive, const std::string& prefix) { archive.entries[prefix] = std::to_string(counter); },
      [&counter](const Archive& archive, const std::string& prefix) -> std::function<void()> {
        return [&counter, value = archive.integer(prefix)] { counter = value; };
      }};
}

Trackable track(double& value) {
  return {[&value](Archive& archive, const std::string& prefix) { archive.set_numbers(prefix, {value}); },
          [&value](const Archive& archive, const std::string& prefix) -> std::function<void()> {
            return [&value, loaded = archive.number(prefix)] { value = loaded; };
          }};
}

namespace {

std::string entry_of_files(const std::string& object) { return object + checkpoint::kListedFiles; }

// Returns where the files of an object lie.
std::string place_of_files(const std::string& path, const Archive& archive, const std::string& object) {
  const auto listed = archive.entries.find(entry_of_files(object));
  if (listed == archive.entries.end()) {
    throw InvalidArgument(text("the checkpoint ", path,
                               " was saved without parameter servers, so they cannot restore \"", object,
                               "\" from it; a Checkpoint without it restores the rest"));
  }
  const auto place =
      checkpoint::path_inside(checkpoint::rows_folder(checkpoint::absolute_path(path).string()), listed->second);
  if (!place.empty()) return place.string();
  throw DataError(text("the checkpoint ", path, " lists \"", listed->second, "\", which is no file of its own"));
}

}  // namespace

Checkpoint::Checkpoint(std::map<std::string, Trackable> objects)
    : objects_(std::move(objects)), ranks_(checkpoint::compose({objects_.begin(), objects_.end()}).ranks) {}

void Checkpoint::write(const std::string& path) const {
  Archive archive;
  const auto whole_path = checkpoint::absolute_path(path).string();
  std::optional<checkpoint::RowsFolder> folder;
  for (const auto& [name, object] : objects_) {
    if (!object.files.save) continue;
    if (!folder) folder.emplace(whole_path);
    const auto number = std::to_string(archive.entries.size());
    object.files.save((folder->folder() / number).string());
    archive.entries[entry_of_files(name)] = text(folder->name(), "/", number);
  }
  for (const auto& [name, object] : objects_) object.save(archive, name);
  archive.entries["save_counter"] = std::to_string(save_counter_);
  ranks_.run_on_rank_0([&] {
    write_archive(path, archive);
    folder ? folder->keep() : checkpoint::remove_rows(whole_path);
  });
}

// The number advances only when the checkpoint was written.
std::string Checkpoint::write_next(const std::string& prefix) {
  const auto path = text(prefix, "-", ++save_counter_);
  try {
    write(path);
  } catch (...) {
    --save_counter_;
    throw;
  }
  return path;
}

std::string Checkpoint::save(const std::string& prefix) {
  const auto path = write_next(prefix);
  ranks_.run_on_rank_0([&] {
    std::vector<std::string> kept;
    record_checkpoint(path, kept);
  });
  return path;
}

void Checkpoint::restore(const std::string& path) {
  Archive archive;
  ranks_.run_on_rank_0([&] { archive = read(path); });
  archive = checkpoint::from_rank_0(checkpoint_file(path), std::move(archive), ranks_);
  const auto counter = archive.integer("save_counter");
  const auto change_objects = checkpoint::compose({objects_.begin(), objects_.end()}).load(archive, "");
  for (const bool change : {false, true}) {
    for (const auto& [name, object] : objects_) {
      if (object.files.load) object.files.load(place_of_files(path, archive, name), change);
    }
  }
  change_objects();
  save_counter_ = counter;
}

// Reads a checkpoint. The optimizer's state that parameter servers wrote is read where this program has no servers.
Archive Checkpoint::read(const std::string& path) const {
  auto archive = read_archive(path);
  for (const auto& [name, object] : objects_) {
    if (object.files.load || !archive.entries.contains(entry_of_files(name))) continue;
    const std::string begin = "optimizer/";
    for (auto& [tensor, stored] : checkpoint::ShardedArchive(place_of_files(path, archive, name)).whole().tensors) {
      if (tensor.starts_with(begin)) archive.tensors[name + "/" + tensor.substr(begin.size())] = std::move(stored);
    }
  }
  return archive;
}

CheckpointManager::CheckpointManager(Checkpoint& checkpoint, std::string directory, CheckpointManagerOptions options)
    : checkpoint_(checkpoint), directory_(std::move(directory)), options_(std::move(options)) {
  if (options_.max_to_keep < 0) {
    throw InvalidArgument(
        text("CheckpointManager: max_to_keep is ", options_.max_to_keep, "; it must be 0 (all) or more"));
  }
  for (const auto& name : read_index(directory_).all) kept_.push_back((fs::path(directory_) / name).string());
}

std::string CheckpointManager::save() {
  const auto path = checkpoint_.write_next((fs::path(directory_) / options_.checkpoint_name).string());
  checkpoint_.ranks_.run_on_rank_0([&] { record_checkpoint(path, kept_, options_.max_to_keep); });
  return path;
}

std::string CheckpointManager::latest() const {
  std::string path;
  checkpoint_.ranks_.run_on_rank_0([&] { path = latest_checkpoint(directory_); });
  return checkpoint_.ranks_.broadcast(path);
}

bool CheckpointManager::restore_or_initialize() {
  const auto path = latest();
  if (path.empty()) return false;
  checkpoint_.restore(path);
  return true;
}

}  // namespace lockstep
