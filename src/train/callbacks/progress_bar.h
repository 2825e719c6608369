// The output of fit while it runs: Keras's bar on a terminal, a line an epoch elsewhere.
#pragma once

#include <chrono>
#include <string>

#include "lockstep/train/callback.h"

namespace lockstep::train {

class ProgressBar : public Callback {
 public:
  void on_epoch_begin(int epoch) override;
  void on_train_batch_begin(std::int64_t batch) override;
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  void on_epoch_end(int epoch, const Logs& logs) override;
  void on_interrupt() override;
  bool only_on_chief() const override { return true; }

 private:
  using Clock = std::chrono::steady_clock;
  double seconds() const { return std::chrono::duration<double>(Clock::now() - epoch_start_).count(); }
  std::string counter() const;

  Clock::time_point epoch_start_;
  Clock::time_point last_shown_;
  std::int64_t first_batch_ = -1;  // of this epoch in this run: not 0 after a restart
  std::int64_t done_ = 0;
  bool redraws_ = false;
};

// Returns true where stdout is a terminal on which one process draws.
bool is_terminal();

// Joins the parts to a line of at most `columns` columns. Where they do not fit, the bar is left out; then the times
// too; then the values are cut off.
std::string fit_line(const std::string& counter, const std::string& bar, const std::string& times,
                     const std::string& values, int columns);

// Returns an epoch's last line, which stays. Where it is too long, the bar is left out; then the line is cut between
// values into several, so that no value is lost.
std::string fit_lines(const std::string& counter, const std::string& bar, const std::string& times, const Logs& logs,
                      int columns);

// Prints "469/469 - 3s - 6ms/step" or the like, followed by the values, on stdout.
void print_line(const std::string& beginning, const Logs& logs);

}  // namespace lockstep::train
