// The state of shards as bytes, which one server sends to another of its job, and so of its version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

namespace lockstep::parameter_server {

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

}  // namespace lockstep::parameter_server
