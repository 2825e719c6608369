#include "train/callbacks/saving.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <regex>
#include <utility>

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/own_files.h"
#include "lockstep/base/error.h"
#include "lockstep/train/model.h"
#include "lockstep/train/saving_callbacks.h"
#include "train/callbacks/background_save.h"
#include "train/callbacks/monitor.h"

namespace lockstep {

namespace {

constexpr int kWidest = 200;  // digits; a name of a file has 255 bytes

// Throws InvalidArgument for what is no format of Python's, and for a width or precision that no name of a file has
// room for.
void check_format(const std::string& spec, const std::string& whole) {
  static const std::regex kFormat("0?([0-9]*)d|0?([0-9]*)(\\.([0-9]+))?[feg]");
  std::smatch parts;
  if (!std::regex_match(spec, parts, kFormat)) {
    throw InvalidArgument(
        text("ModelCheckpoint: \"", spec, "\" in ", whole, " is no format; such as {epoch:02d} or {loss:.2f} are"));
  }
  for (const auto& digits : {parts.str(1), parts.str(2), parts.str(4)}) {
    if (digits.empty() || whole_number<int>(digits).value_or(kWidest + 1) <= kWidest) continue;
    throw InvalidArgument(text("ModelCheckpoint: \"", spec, "\" in ", whole, " asks for ", digits, " digits; at most ",
                               kWidest, " are allowed"));
  }
}

// `value` in Python's format `spec`: a number such as 02d or .2f, or nothing.
std::string formatted(double value, const std::string& spec, const std::string& whole) {
  const bool integer = spec.empty() ? value == std::floor(value) : spec.back() == 'd';
  if (!spec.empty()) check_format(spec, whole);
  std::string pattern = "%" + spec;
  if (spec.empty()) pattern += integer ? "d" : "g";
  if (integer) pattern.insert(pattern.size() - 1, "ll");
  if (!std::isfinite(value)) return text(value);
  const auto print = [&](char* to, std::size_t size) {
    return integer ? std::snprintf(to, size, pattern.c_str(), std::llround(value))
                   : std::snprintf(to, size, pattern.c_str(), value);
  };
  std::string digits(static_cast<std::size_t>(print(nullptr, 0)), '\0');
  print(digits.data(), digits.size() + 1);
  return digits;
}

}  // namespace

std::string train::fill_in(const std::string& path, const std::function<double(const std::string& name)>& value_of) {
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
    result += formatted(value_of(name), colon == std::string::npos ? "" : inside.substr(colon + 1), path);
    at = end;
  }
  return result;
}

std::string train::fixed_folder_of(const std::string& filepath) {
  const auto folder = std::filesystem::path(filepath.substr(0, filepath.find('{'))).parent_path();
  return folder.empty() ? "." : folder.string();
}

ModelCheckpoint::ModelCheckpoint(std::string filepath, ModelCheckpointOptions options)
    : filepath_(std::move(filepath)), options_(std::move(options)), background_(std::make_shared<BackgroundSave>()) {
  require(options_.save_freq >= 0, "ModelCheckpoint: save_freq", options_.save_freq, "0 or more");
  require(options_.max_to_keep >= 0, "ModelCheckpoint: max_to_keep", options_.max_to_keep, "0 or more");
}

void ModelCheckpoint::on_train_begin() {
  auto& impl = unwrap(model());
  if (options_.save_best_only) mode_ = train::resolved("ModelCheckpoint", options_.mode, options_.monitor, model());
  std::vector<std::string> names{"epoch", "batch"};
  for (const auto& [name, value] : impl.state.tracker->logs()) {
    names.push_back(name);
    if (plan().validates && options_.save_freq == 0) names.push_back("val_" + name);
  }
  // A callback of the user's may add logs of its own.
  const bool known =
      std::all_of(impl.state.callbacks.begin(), impl.state.callbacks.end(), [](const AnyCallback& callback) {
        return train::name_of_type(*callback.operator->()).starts_with("lockstep::");
      });
  train::fill_in(filepath_, [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) != names.end()) return 0.0;
    if (!known && !name.starts_with("val_")) return 0.0;
    const char* const why = plan().validates || !name.starts_with("val_") ? "" : " (this fit has no validation_data)";
    throw InvalidArgument(
        text("ModelCheckpoint: no log is called {", name, "} as in ", filepath_, why, "; there are ", join(names)));
  });
  if (options_.background) impl.lead->require_background("ModelCheckpoint");
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
  since_save_ += unwrap(model()).fit.batches_of_call;
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
    impl.lead->write({.path = path, .weights_only = options_.save_weights_only});
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
  prepare_again(model(), "ModelCheckpoint", written_);
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

}  // namespace lockstep
