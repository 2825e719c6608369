// What Lockstep throws. Every exception derives from Error; its text says what was wrong, with the value, and what to
// do.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

namespace lockstep {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An argument that no correct program passes. Names the argument, its value and what is allowed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// Data that cannot be read or is not what it claims to be. Names the file, and the offset where it is known.
class DataError : public Error {
 public:
  using Error::Error;
};

// The file system refused to store or to hand over a file. Names the file and the system's reason.
class IoError : public Error {
 public:
  using Error::Error;
};

// A wait ended at its deadline.
class DeadlineExceeded : public Error {
 public:
  DeadlineExceeded(const std::string& operation, std::chrono::duration<double> waited_for);

  const std::string& operation() const noexcept { return operation_; }
  std::chrono::duration<double> waited_for() const noexcept { return waited_for_; }

 private:
  std::string operation_;
  std::chrono::duration<double> waited_for_;
};

// The Group was aborted, here or by another rank, while this rank was in an operation or before it began one.
class Aborted : public Error {
 public:
  using Error::Error;
};

// SIGINT or SIGTERM ended `fit` after a whole step; what the callbacks keep was saved before this was thrown.
class Interrupted : public Error {
 public:
  explicit Interrupted(int signal);

  int signal() const noexcept { return signal_; }

 private:
  int signal_;
};

}  // namespace lockstep
