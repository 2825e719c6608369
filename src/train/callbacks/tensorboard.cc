#include "train/callbacks/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/model.h"
#include "train/model_impl.h"

namespace lockstep::train {

// A record:                                     An Event, in protobuf's wire format, of which three kinds of field are
// needed:
//   8 bytes  length, little endian                1 wall_time (double)  2 step (int64)
//   4 bytes  masked CRC-32C of the length         3 file_version (string), in the first event
//   n bytes  the event                            5 summary { 1 value { 1 tag (string)  2 simple_value (float) } }
//   4 bytes  masked CRC-32C of the event

namespace {

constexpr std::array<std::uint32_t, 256> make_crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0x82f63b78 : value >> 1;
    table[i] = value;
  }
  return table;
}

std::uint32_t masked_crc32c(const std::string& bytes) {
  static constexpr auto kTable = make_crc32c_table();
  std::uint32_t crc = 0xffffffff;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ crc >> 8;
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8;
}

template <class T>
std::string little_endian(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
static_assert(std::endian::native == std::endian::little);

enum WireType : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string key(std::uint64_t field, WireType type) { return varint(field << 3 | type); }
std::string bytes_field(std::uint64_t field, const std::string& bytes) {
  return key(field, kBytes) + varint(bytes.size()) + bytes;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string event(std::int64_t step, const std::string& content) {
  return key(1, kFixed64) + little_endian(seconds_since_1970()) + key(2, kVarint) +
         varint(static_cast<std::uint64_t>(step)) + content;
}

// Later files sort after earlier ones, also those of one second and one process.
std::string file_name() {
  static int made = 0;
  return text("events.out.tfevents.", static_cast<std::int64_t>(seconds_since_1970()), ".", name_of_this_host(), ".",
              ::getpid(), ".", made++, ".v2");
}

}  // namespace

EventFile::EventFile(const std::string& directory) : directory_(directory) { open(); }

void EventFile::open() {
  std::error_code failed;
  std::filesystem::create_directories(directory_, failed);
  do {
    path_ = (std::filesystem::path(directory_) / file_name()).string();
    const FileDescriptor made(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (made.open() || errno != EEXIST) break;  // a file that is there is somebody else's
  } while (true);
  file_ = std::ofstream(path_, std::ios::binary | std::ios::app);
  if (!file_)
    throw IoError(
        text("cannot write TensorBoard's log ", path_, ": ", failed ? failed.message() : std::strerror(errno)));
  record(event(0, bytes_field(3, "brain.Event:2")));
  file_.flush();
}

bool EventFile::is_there() const {
  std::error_code unknown;
  return std::filesystem::exists(path_, unknown) || unknown;
}

void EventFile::scalar(const std::string& tag, std::int64_t step, double value) {
  const auto summary_value = bytes_field(1, tag) + key(2, kFixed32) + little_endian(static_cast<float>(value));
  record(event(step, bytes_field(5, bytes_field(1, summary_value))));
}

void EventFile::record(const std::string& bytes) {
  const auto length = little_endian(static_cast<std::uint64_t>(bytes.size()));
  file_ << length << little_endian(masked_crc32c(length)) << bytes << little_endian(masked_crc32c(bytes));
}

// Writes to a file that somebody has removed are lost without an error from the system.
void EventFile::flush() {
  file_.flush();
  if (!is_there()) {
    log_warning(text("TensorBoard's log ", path_, " was removed; it goes on in a new file"));
    return open();
  }
  if (!file_) throw IoError(text("cannot write TensorBoard's log ", path_, ": ", std::strerror(errno)));
}

}  // namespace lockstep::train

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
  require(options_.update_freq >= 0, "TensorBoard: update_freq", options_.update_freq, "0 (epochs only) or more");
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
