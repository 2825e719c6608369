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

// Copies what read(frame) yields until it returns false. Throws InvalidArgument where it is not as long as `parts`.
void read_bulk(std::span<const std::span<std::byte>> parts, const std::function<bool(grpc::ByteBuffer&)>& read);

}  // namespace lockstep::grpc_service
