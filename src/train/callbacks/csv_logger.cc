#include <cerrno>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <vector>

#include "base/text.h"
#include "lockstep/callbacks.h"
#include "lockstep/error.h"

namespace lockstep {

CSVLogger::CSVLogger(std::string filename, CSVLoggerOptions options)
    : filename_(std::move(filename)), options_(options) {}

void CSVLogger::write(const std::string& line) const {
  std::ofstream file(filename_, std::ios::app);
  file << line << '\n';
  file.flush();
  if (!file) throw IoError(text("cannot write ", filename_, ": ", std::strerror(errno)));
}

void CSVLogger::on_train_begin() {
  if (!options_.append) std::ofstream(filename_, std::ios::trunc);
  has_header_ = std::ifstream(filename_).peek() != std::ifstream::traits_type::eof();
}

void CSVLogger::on_epoch_end(int epoch, const Logs& logs) {
  std::string header = "epoch";
  std::string line = std::to_string(epoch);
  for (const auto& [name, value] : logs) {
    header += options_.separator + name;
    line += text(options_.separator, std::setprecision(17), value);
  }
  if (!has_header_) write(header);
  has_header_ = true;
  write(line);
}

void CSVLogger::save(Archive& archive, const std::string& prefix) const {
  std::ifstream file(filename_);
  std::ostringstream lines;
  lines << file.rdbuf();
  archive.entries[prefix + "/lines"] = lines.str();
}

// The file as it was when the checkpoint was made, whatever was written since.
void CSVLogger::load(const Archive& archive, const std::string& prefix) {
  const auto& lines = archive.entry(prefix + "/lines");
  std::ofstream(filename_, std::ios::trunc) << lines;
  has_header_ = !lines.empty();
}

}  // namespace lockstep
