#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "lockstep/base/error.h"
#include "lockstep/train/callbacks.h"

namespace lockstep {

namespace {

constexpr std::size_t kLongest = std::size_t{1} << 30;  // bytes of a log that is read again

// The file's contents; empty for a terminal, or another device that a person logs to.
std::string contents_of(const std::string& file) {
  std::error_code unknown;
  return std::filesystem::is_regular_file(file, unknown) ? read_small_file(file, kLongest) : "";
}

}  // namespace

CSVLogger::CSVLogger(std::string filename, CSVLoggerOptions options)
    : filename_(std::move(filename)), options_(options) {}

void CSVLogger::write(const std::string& line) const {
  std::ofstream file(filename_, std::ios::app);
  file << line << '\n';
  file.flush();
  if (!file) throw IoError(text("cannot write ", filename_, ": ", std::strerror(errno)));
}

void CSVLogger::on_train_begin() {
  columns_.clear();
  std::ofstream file(filename_, options_.append ? std::ios::app : std::ios::trunc);
  if (!file) throw IoError(text("cannot write ", filename_, ": ", std::strerror(errno)));
  if (!options_.append) return;
  read_header();
  const auto lines = contents_of(filename_);
  if (lines.empty() || lines.ends_with('\n')) return;
  log_warning(text("CSVLogger: the last line of ", filename_, ", \"", lines.substr(lines.rfind('\n') + 1),
                   "\", has no end, and may be cut off: it stays as it is, and the next line begins after it"));
  write("");
}

// Goes on in the file after its last whole line.
void CSVLogger::on_become_chief() {
  columns_.clear();
  const auto lines = contents_of(filename_);
  const auto end = lines.rfind('\n');
  const auto whole = end == std::string::npos ? 0 : end + 1;
  std::error_code ignored;  // then a line stays that was cut short
  if (whole < lines.size()) std::filesystem::resize_file(filename_, whole, ignored);
  read_header();
  if (whole == 0) return;
  const auto begin = end == 0 ? std::string::npos : lines.rfind('\n', end - 1);
  if (begin == std::string::npos) return;
  const auto last = lines.substr(begin + 1, end - begin - 1);
  written_before_ = whole_number<int>(last.substr(0, last.find(options_.separator)));
}

void CSVLogger::on_epoch_end(int epoch, const Logs& logs) {
  if (std::exchange(written_before_, std::nullopt) == epoch) return;
  if (columns_.empty()) write_header(logs);
  std::string line = std::to_string(epoch);
  for (const auto& column : columns_) {
    line += logs.contains(column) ? text(options_.separator, std::setprecision(17), logs[column])
                                  : text(options_.separator, "NA");
  }
  write(line);
}

// The columns: the first epoch's logs and, with validation data, the val_ logs that a later epoch adds.
void CSVLogger::write_header(const Logs& logs) {
  bool validated = false;
  for (const auto& [name, value] : logs) {
    columns_.push_back(name);
    validated = validated || name.starts_with("val_");
  }
  if (plan().validates && !validated) {
    for (const auto& [name, value] : logs) columns_.push_back("val_" + name);
  }
  write(text("epoch", options_.separator, join(columns_, std::string(1, options_.separator).c_str())));
}

void CSVLogger::read_header() {
  std::istringstream lines(contents_of(filename_));
  std::string line, column;
  std::getline(lines, line);
  std::istringstream header(line);
  std::getline(header, column, options_.separator);  // "epoch"
  while (std::getline(header, column, options_.separator)) columns_.push_back(column);
}

void CSVLogger::save(Archive& archive, const std::string& prefix) const {
  archive.entries[prefix + "/lines"] = contents_of(filename_);
}

// Restores the file as it was when the checkpoint was made.
std::function<void()> CSVLogger::load(const Archive& archive, const std::string& prefix) {
  return [this, lines = archive.entry(prefix + "/lines")] {
    try {
      const auto part = std::as_bytes(std::span(lines));
      checkpoint::write_file_atomically(filename_, {&part, 1});
    } catch (const IoError& error) {
      log_warning(text("CSVLogger: ", error.what(), "; lines that were written after the checkpoint stay"));
    }
    columns_.clear();
    read_header();
  };
}

}  // namespace lockstep
