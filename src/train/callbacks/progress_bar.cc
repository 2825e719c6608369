#include "train/callbacks/progress_bar.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <optional>

#include "base/file.h"
#include "base/text.h"

namespace lockstep::train {
namespace {

constexpr int kBarWidth = 20;
constexpr int kUsualColumns = 80;
constexpr int kLaunchersPrefix = 11;          // "[worker 0] "
constexpr const char* kClearLine = "\x1b[K";  // the cursor is at its beginning
constexpr auto kBetweenLines = std::chrono::milliseconds(50);

// Prints as Keras does: four decimals, or an exponent for values too small for them.
std::string number(double value) {
  const bool small = value != 0 && std::abs(value) <= 1e-3;
  return text(small ? std::scientific : std::fixed, std::setprecision(4), value);
}

std::string words_of(const std::string& name, double value) { return text(" - ", name, ": ", number(value)); }

std::string values_of(const Logs& logs) {
  std::string line;
  for (const auto& [name, value] : logs) line += words_of(name, value);
  return line;
}

std::string duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole >= 3600)
    return text(whole / 3600, ":", std::setw(2), std::setfill('0'), whole / 60 % 60, ":", std::setw(2), whole % 60);
  if (whole >= 60) return text(whole / 60, ":", std::setw(2), std::setfill('0'), whole % 60);
  return text(whole, "s");
}

std::string per_step(double seconds) {
  if (seconds >= 1) return text(std::llround(seconds), "s/step");
  if (seconds >= 1e-2) return text(std::llround(seconds * 1e3), "ms/step");
  if (seconds >= 1e-3) return text(std::fixed, std::setprecision(1), seconds * 1e3, "ms/step");
  return text(std::llround(seconds * 1e6), "us/step");
}

// Returns the columns of the text, in UTF-8, on a terminal.
int width_of(const std::string& text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string cut(const std::string& text, int columns) {
  const std::string dots = "...";
  if (width_of(text) <= columns) return text;
  std::size_t end = 0;
  for (int shown = 0; end < text.size(); ++end) {
    const bool begins = (text[end] & 0xC0) != 0x80;
    if (begins && ++shown > columns - width_of(dots)) break;
  }
  return text.substr(0, end) + dots;
}

std::optional<int> columns_of(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

// Returns the columns of a redrawn line. A launcher prefixes the line and writes it to its own terminal.
int columns_of_terminal() {
  if (const auto columns = columns_of(STDOUT_FILENO)) return *columns - 1;
  const FileDescriptor terminal(open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC));
  const auto columns = terminal.open() ? columns_of(terminal.get()) : std::nullopt;
  return columns.value_or(kUsualColumns) - kLaunchersPrefix - 1;
}

std::string bar(std::int64_t done, std::int64_t of) {
  const auto filled = of > 0 ? done * kBarWidth / of : 0;
  std::string result;
  for (int i = 0; i < kBarWidth; ++i) result += i < filled ? "━" : "─";
  return result;
}

}  // namespace

// A line that is redrawn is for a person's terminal. `lockstep run` says whether it has one. mpirun gives its ranks
// pseudo-terminals, whose other end is a pipe in which all ranks' lines are mixed.
bool is_terminal() {
  if (const char* const launchers = std::getenv("LOCKSTEP_TERMINAL")) return launchers == std::string("1");
  const auto started_by = [](const char* variable) { return std::getenv(variable) != nullptr; };
  return ::isatty(STDOUT_FILENO) == 1 && !started_by("OMPI_COMM_WORLD_RANK") && !started_by("PMI_RANK");
}

std::string fit_line(const std::string& counter, const std::string& bar, const std::string& times,
                     const std::string& values, int columns) {
  for (const auto& line : {counter + " " + bar + times + values, counter + times + values, counter + values}) {
    if (width_of(line) <= columns) return line;
  }
  return cut(counter + values, columns);
}

std::string fit_lines(const std::string& counter, const std::string& bar, const std::string& times, const Logs& logs,
                      int columns) {
  const auto with_bar = counter + " " + bar + times;
  if (width_of(with_bar + values_of(logs)) <= columns) return with_bar + values_of(logs);
  std::string lines, line = counter + times;
  for (const auto& [name, value] : logs) {
    const auto more = words_of(name, value);
    if (width_of(line + more) > columns) {
      lines += line + "\n";
      line = "   ";
    }
    line += more;
  }
  return lines + line;
}

void print_line(const std::string& beginning, const Logs& logs) {
  std::cout << beginning << values_of(logs) << '\n' << std::flush;
}

std::string ProgressBar::counter() const {
  return plan().steps > 0 ? text(done_, "/", plan().steps) : std::to_string(done_);
}

void ProgressBar::on_epoch_begin(int epoch) {
  epoch_start_ = Clock::now();
  last_shown_ = {};
  first_batch_ = -1;
  redraws_ = plan().verbose == 1 && is_terminal();
  std::cout << "Epoch " << epoch + 1 << "/" << plan().epochs << '\n' << std::flush;
}

void ProgressBar::on_train_batch_begin(std::int64_t batch) {
  if (first_batch_ < 0) first_batch_ = batch;
}

void ProgressBar::on_train_batch_end(std::int64_t batch, const Logs& logs) {
  done_ = batch + 1;
  const auto now = Clock::now();
  if (!redraws_ || now - last_shown_ < kBetweenLines) return;
  last_shown_ = now;
  const double step = seconds() / static_cast<double>(done_ - first_batch_);
  const std::string left = plan().steps > 0 ? duration(step * static_cast<double>(plan().steps - done_)) : "?";
  std::cout << kClearLine
            << fit_line(counter(), bar(done_, plan().steps), text(" ", left, " ", per_step(step)), values_of(logs),
                        columns_of_terminal())
            << '\r' << std::flush;
}

void ProgressBar::on_epoch_end(int, const Logs& logs) {
  const double step =
      seconds() / static_cast<double>(std::max<std::int64_t>(1, done_ - std::max<std::int64_t>(0, first_batch_)));
  if (plan().verbose == 1) {
    const auto times = text(" ", duration(seconds()), " ", per_step(step));
    if (redraws_) {
      std::cout << kClearLine << fit_lines(counter(), bar(1, 1), times, logs, columns_of_terminal()) << '\n'
                << std::flush;
    } else {
      print_line(text(counter(), " ", bar(1, 1), times), logs);
    }
  } else {
    print_line(text(counter(), " - ", duration(seconds()), " - ", per_step(step)), logs);
  }
}

void ProgressBar::on_interrupt() { std::cout << "\ninterrupted after step " << counter() << '\n' << std::flush; }

}  // namespace lockstep::train
