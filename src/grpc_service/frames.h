// A call as gRPC carries it: a message of protobuf, then bulk data in pieces.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

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

}  // namespace lockstep::grpc_service
