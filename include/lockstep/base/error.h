// The exceptions of Lockstep. Every exception derives from Error; its text says what was wrong, with the value, and
// what to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

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

// The machines or processes do not match the cluster's description. Names the field, the address or the rank.
class ClusterError : public Error {
 public:
  using Error::Error;
};

// Workers were lost together that alone had a part of the training's state: it can go on only from a checkpoint.
class StateLost : public ClusterError {
 public:
  using ClusterError::ClusterError;
};

// A wait ended at its deadline, here or on another rank of the Group.
class DeadlineExceeded : public Error {
 public:
  // `ranks`: those that did not arrive in time; empty where that is not known.
  DeadlineExceeded(const std::string& operation, std::chrono::duration<double> waited_for, std::vector<int> ranks = {},
                   const std::string& detail = "");

  const std::string& operation() const noexcept { return operation_; }
  std::chrono::duration<double> waited_for() const noexcept { return waited_for_; }
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::string operation_;
  std::chrono::duration<double> waited_for_;
  std::vector<int> ranks_;
};

// Another rank's process ended, its host went away, or it left the Group.
class PeerLost : public Error {
 public:
  PeerLost(int rank, std::int64_t generation, const std::string& how);

  int rank() const noexcept { return rank_; }
  std::int64_t generation() const noexcept { return generation_; }  // of the World whose rank it is
  const std::string& how() const noexcept { return how_; }          // the message without the rank

 private:
  int rank_;
  std::int64_t generation_;
  std::string how_;
};

// The Group was aborted, here or by another rank, while this rank was in an operation or before it began one.
class Aborted : public Error {
 public:
  using Error::Error;
};

// SIGINT or SIGTERM ended `fit` after a complete step; the callbacks that save state had saved it before.
class Interrupted : public Error {
 public:
  explicit Interrupted(int signal);

  int signal() const noexcept { return signal_; }

 private:
  int signal_;
};

}  // namespace lockstep
