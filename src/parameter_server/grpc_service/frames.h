// A call as gRPC carries it: a message of protobuf, then bulk data in pieces, at last a status.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "kernels/half.h"
#include "lockstep/base/error.h"

namespace lockstep::grpc_service {

inline constexpr const char* kMethod = "/lockstep.ParameterServer/Call";
inline constexpr std::size_t kLongestMessage = std::size_t{8} << 20;

// Bulk data that is sent as it lies. `owner` lives until gRPC needs the data no more.
struct Bulk {
  std::vector<std::span<const std::byte>> parts;
  std::shared_ptr<const void> owner;
};

grpc::ByteBuffer frame_of(const google::protobuf::MessageLite& message);

// Calls write(frame) for each piece until one returns false.
bool write_bulk(const Bulk& bulk, const std::function<bool(const grpc::ByteBuffer&)>& write);

// False where it is none.
bool parse(const grpc::ByteBuffer& frame, google::protobuf::MessageLite& message);

// Bulk data whose length the receiver does not know beforehand, written and read in any pieces.
class BulkWriter {
 public:
  // Both throw Aborted where write(frame) returns false.
  explicit BulkWriter(std::function<bool(const grpc::ByteBuffer&)> write) : write_(std::move(write)) {}
  void add(std::span<const std::byte> data);
  void finish();  // after the last

 private:
  const std::function<bool(const grpc::ByteBuffer&)> write_;
  std::vector<std::byte> piece_;
};
class BulkReader {
 public:
  explicit BulkReader(std::function<bool(grpc::ByteBuffer&)> read) : read_(std::move(read)) {}

  // Fills `data`. Throws InvalidArgument where there is less.
  void fill(std::span<std::byte> data);

 private:
  const std::function<bool(grpc::ByteBuffer&)> read_;
  std::vector<grpc::Slice> slices_;  // of the last frame
  std::size_t slice_ = 0, offset_ = 0;
};

// Copies what read(frame) yields until it returns false. Throws InvalidArgument where it is not as long as `parts`.
void read_bulk(std::span<const std::span<std::byte>> parts, const std::function<bool(grpc::ByteBuffer&)>& read);

// Memory for what calls receive and send, used again: new pages cost as much as copying into them. Any thread. What it
// gave out may outlive it.
class ReceiveBuffers {
 public:
  // Not initialized. Given back with the last copy.
  std::shared_ptr<std::byte[]> take(std::size_t bytes);

 private:
  struct Free {
    std::size_t bytes;
    std::unique_ptr<std::byte[]> memory;
  };
  struct State {
    static constexpr std::size_t kMost = 8;  // that are kept
    Mutex mutex;
    std::vector<Free> free LOCKSTEP_GUARDED_BY(mutex);  // the one that was given back last is the last
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Memory for parts of these sizes, each aligned for any element.
struct Parts {
  Parts(const std::vector<std::size_t>& sizes, ReceiveBuffers& buffers);

  std::shared_ptr<std::byte[]> memory;
  std::vector<std::span<std::byte>> parts;
};

// Reads parts, as read_bulk. Parts that are `rounded` are floats that come as bfloat16; an empty `rounded` names none.
Parts read_parts(const std::vector<std::size_t>& sizes, const std::vector<bool>& rounded, ReceiveBuffers& buffers,
                 const std::function<bool(grpc::ByteBuffer&)>& read);

// Floats rounded to the nearest bfloat16, half as many bytes; and back.
inline void to_bfloat16(std::span<const std::byte> floats, std::span<std::byte> rounded) {
  const auto* const from = reinterpret_cast<const float*>(floats.data());
  auto* const to = reinterpret_cast<kernels::BFloat16*>(rounded.data());
  for (std::size_t i = 0; i < rounded.size() / sizeof(*to); ++i) to[i] = kernels::BFloat16(from[i]);
}
inline void from_bfloat16(std::span<const std::byte> rounded, std::span<std::byte> floats) {
  const auto* const from = reinterpret_cast<const kernels::BFloat16*>(rounded.data());
  auto* const to = reinterpret_cast<float*>(floats.data());
  for (std::size_t i = 0; i < rounded.size() / sizeof(*from); ++i) to[i] = static_cast<float>(from[i]);
}

// A shared block that the server does not have (any more).
class UnknownBlock : public Error {
 public:
  using Error::Error;
};

// Returns the status of the exception that is handled.
grpc::Status status_of_exception();

// True where the call may succeed later: the process is starting again, or cannot be reached.
bool may_come_back(const grpc::Status& status);

// Throws what status_of_exception was made of; `who` has answered.
[[noreturn]] void throw_status(const grpc::Status& status, const std::string& who);

}  // namespace lockstep::grpc_service
