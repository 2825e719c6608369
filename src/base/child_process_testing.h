// For tests: a part of a test in a process of its own.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>

namespace lockstep {

// A forked child that calls `act` and sends back the returned text, or the text of the exception that it throws.
class ChildProcess {
 public:
  template <class Act>
  explicit ChildProcess(const Act& act) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("no process");
    if (pid_ == 0) {
      ::close(ends[0]);
      std::string said;
      try {
        said = act();
      } catch (const std::exception& error) {
        said = error.what();
      }
      const auto written = ::write(ends[1], said.data(), said.size());
      ::_exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      said();
    }
    ::close(out_);
  }

  // Waits for its end; one that hangs is killed after five minutes, and its text says so.
  std::string said() {
    constexpr auto kLongest = std::chrono::minutes(5);
    const auto end = std::chrono::steady_clock::now() + kLongest;
    std::string all;
    char bytes[4096];
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()).count();
      pollfd readable{out_, POLLIN, 0};
      if (left <= 0 || ::poll(&readable, 1, static_cast<int>(left)) == 0) {
        ::kill(pid_, SIGKILL);
        all += " (it had not ended after 5 minutes)";
        break;
      }
      const ssize_t count = ::read(out_, bytes, sizeof bytes);
      if (count <= 0) break;
      all.append(bytes, static_cast<std::size_t>(count));
    }
    ::waitpid(pid_, &status_, 0);
    ended_ = true;
    return all;
  }
  int status() const { return status_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  int out_ = -1;
  int status_ = -1;
  bool ended_ = false;
};

}  // namespace lockstep
