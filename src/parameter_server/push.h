// A worker sends a Push to a server when it has computed a task. Servers keep pushes until the other parts of their
// step have come, and pass on their state as a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "parameter_server/table.h"

namespace lockstep::parameter_server {

// The state of shards as bytes, which one server sends to another of its job, and so of its version.
class StateWriter {
 public:
  explicit StateWriter(std::function<void(std::span<const std::byte>)> write) : write_(std::move(write)) {}

  void bytes(std::span<const std::byte> data) { write_(data); }
  template <class T>
  requires std::is_arithmetic_v<T>
  void number(T value) { bytes(std::as_bytes(std::span(&value, 1))); }
  void numbers(std::span<const std::int64_t> values) {
    number(values.size());
    bytes(std::as_bytes(values));
  }

 private:
  std::function<void(std::span<const std::byte>)> write_;
};

// Reads in the order in which was written.
class StateReader {
 public:
  // `read` fills what it is given, or throws.
  explicit StateReader(std::function<void(std::span<std::byte>)> read) : read_(std::move(read)) {}

  void bytes(std::span<std::byte> data) { read_(data); }
  template <class T>
  requires std::is_arithmetic_v<T> T number() {
    T value;
    bytes(std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  std::vector<std::int64_t> numbers() {
    std::vector<std::int64_t> values(number<std::size_t>());
    bytes(std::as_writable_bytes(std::span(values)));
    return values;
  }

  // Throws DataError where the next number is not `expected`, which the two sides have in common.
  void expect(std::int64_t expected);

 private:
  std::function<void(std::span<std::byte>)> read_;
};

// The times at which gradients become updates.

// Asynchronous unless set: each step is computed by one worker, and workers do not wait for each other.
struct UpdateMode {
  // Above 1, workers compute a step together, each a part of its batch; the next step begins when the step is applied
  // (synchronous). The first `needed` of the parts to come make the update. With fewer than `parts`, there are spare
  // workers (Chen et al., "Revisiting distributed synchronous SGD", 2016).
  int parts = 1;
  int needed = 1;

  // Steps that a worker may have finished more than another before it waits; -1: any number. Ho et al., "More effective
  // distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
  int most_ahead = -1;
};

// Throws InvalidArgument for parts below 1, and parts that are needed and cannot come.
void check(const UpdateMode& mode);

// A worker sends this to a server when it has computed a task.

// A worker computes this at a time: one part of one step. A step is one update of each shard, whoever computes it.
struct Task {
  std::int64_t step = 0;
  int part = 0;

  auto operator<=>(const Task&) const = default;
};

struct Push {
  Task task;
  double weight = 0;  // what the sum of gradients is to be divided by; 0: there were no examples

  // [shard of the server]: count() elements of the shard's dtype, or null where a parameter took no part.
  std::vector<const std::byte*> gradients = {};

  // [table]: gradients of the server's rows, for the rows of which the part has some, none of them twice.
  std::vector<Rows> rows = {};

  // Keeps what these point at: a server may read it until the step is applied. Null: what they point at is valid, and
  // stays as it is, while the push is called, and no longer.
  std::shared_ptr<const void> memory = {};

  std::optional<double> learning_rate = {};  // instead of the optimizer's own

  // The chief that gave out the task: chiefs of a job are numbered from 1 on.
  std::int64_t chief = 0;

  std::int64_t finished = 0;  // no other push of a step below this one is on its way
};

// Bytes of what pushes have.
struct PushSizes {
  std::vector<std::size_t> shards;  // of each
  std::vector<std::size_t> rows;    // of one row of each table
};

// Has it own copies of what it points at.
void keep(Push& push, const PushSizes& sizes);

void send(const Push& push, const PushSizes& sizes, StateWriter& to);
Push receive_push(const PushSizes& sizes, StateReader& from);

}  // namespace lockstep::parameter_server
