// Processes of a test, and what they print.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "transport/socket.h"

extern char** environ;

namespace lockstep {

// Ended with its owner.
class Process {
 public:
  explicit Process(std::vector<std::string> command) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    out_ = FileDescriptor(ends[0]);
    const FileDescriptor in(ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in.get(), STDOUT_FILENO);
    std::vector<char*> raw;
    for (auto& argument : command) raw.push_back(argument.data());
    raw.push_back(nullptr);
    const int error = posix_spawn(&pid_, raw[0], &actions, nullptr, raw.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) throw std::runtime_error("cannot start " + command[0]);
  }
  Process(Process&& other) noexcept
      : out_(std::move(other.out_)), text_(std::move(other.text_)), pid_(std::exchange(other.pid_, 0)) {}
  ~Process() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  void send(int signal) const { kill(pid_, signal); }

  // Everything that it has printed, as soon as `part` is in it. Throws when that does not come in time.
  const std::string& wait_for(const std::string& part, double seconds) {
    return wait_until([&] { return text_.find(part) != std::string::npos; }, part, seconds);
  }

  // Waits for a line that begins with `start`.
  const std::string& wait_for_line(const std::string& start, double seconds) {
    return wait_until([&] { return ("\n" + text_).find("\n" + start) != std::string::npos; }, start, seconds);
  }

  // Everything that it printed, when it has ended.
  const std::string& wait_for_end(double seconds) {
    const auto deadline = Deadline::after(std::chrono::duration<double>(seconds));
    while (read_some(deadline)) {
    }
    if (deadline.passed()) throw std::runtime_error("still running after: " + text_);
    waitpid(std::exchange(pid_, 0), &status_, 0);
    return text_;
  }

  const std::string& text() const { return text_; }
  int status() const { return status_; }
  pid_t pid() const { return pid_; }

 private:
  template <class Condition>
  const std::string& wait_until(const Condition& holds, const std::string& expected, double seconds) {
    const auto deadline = Deadline::after(std::chrono::duration<double>(seconds));
    while (!holds()) {
      if (!read_some(deadline)) throw std::runtime_error("no \"" + expected + "\" in: " + text_);
    }
    return text_;
  }

  bool read_some(Deadline deadline) {
    if (!transport::wait_for_events(out_.get(), POLLIN, deadline)) return false;
    char bytes[4096];
    const auto count = read(out_.get(), bytes, sizeof bytes);
    if (count > 0) text_.append(bytes, static_cast<std::size_t>(count));
    return count > 0;
  }

  FileDescriptor out_;
  std::string text_;
  pid_t pid_ = 0;
  int status_ = -1;
};

}  // namespace lockstep
