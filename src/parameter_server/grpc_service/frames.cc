#include "parameter_server/grpc_service/frames.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::grpc_service {

namespace {

// Small pieces let the receiver begin early; large ones cost less each.
constexpr std::size_t kSmallPiece = 256 << 10, kLargePiece = std::size_t{4} << 20;

grpc::Slice slice_of(std::span<const std::byte> bytes, const std::shared_ptr<const void>& owner) {
  using Owner = std::shared_ptr<const void>;
  return {const_cast<std::byte*>(bytes.data()), bytes.size(), [](void* kept) { delete static_cast<Owner*>(kept); },
          new Owner(owner)};
}

}  // namespace

grpc::ByteBuffer frame_of(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

bool parse(const grpc::ByteBuffer& frame, google::protobuf::MessageLite& message) {
  grpc::Slice slice;
  if (!frame.DumpToSingleSlice(&slice).ok()) return false;
  return message.ParseFromArray(slice.begin(), static_cast<int>(slice.size()));
}

bool write_bulk(const Bulk& bulk, const std::function<bool(const grpc::ByteBuffer&)>& write) {
  std::size_t total = 0;
  for (const auto& part : bulk.parts) total += part.size();
  const auto piece = total < kLargePiece ? kSmallPiece : kLargePiece;
  std::vector<grpc::Slice> slices;
  std::size_t filled = 0;
  const auto flush = [&] {
    if (slices.empty()) return true;
    const grpc::ByteBuffer frame(slices.data(), slices.size());
    slices.clear();
    filled = 0;
    return write(frame);
  };
  for (auto part : bulk.parts) {
    while (!part.empty()) {
      const auto count = std::min(part.size(), piece - filled);
      slices.push_back(slice_of(part.first(count), bulk.owner));
      part = part.subspan(count);
      filled += count;
      if (filled == piece && !flush()) return false;
    }
  }
  return flush();
}

void read_bulk(std::span<const std::span<std::byte>> parts, const std::function<bool(grpc::ByteBuffer&)>& read) {
  std::size_t expected = 0, received = 0;
  for (const auto& part : parts) expected += part.size();
  auto part = parts.begin();
  std::size_t offset = 0;  // in *part
  const auto copy = [&](const std::uint8_t* data, std::size_t count) {
    received += count;
    if (received > expected) throw InvalidArgument(text("more than the ", expected, " bytes of its shards were sent"));
    while (count > 0) {
      const auto here = std::min(count, part->size() - offset);
      if (here > 0) std::memcpy(part->data() + offset, data, here);
      data += here;
      count -= here;
      offset += here;
      if (offset == part->size() && count > 0) ++part, offset = 0;
    }
  };
  for (grpc::ByteBuffer frame; read(frame);) {
    std::vector<grpc::Slice> slices;
    if (!frame.Dump(&slices).ok()) break;
    for (const auto& slice : slices) copy(slice.begin(), slice.size());
  }
  if (received != expected) {
    throw InvalidArgument(text(received, " bytes were sent, and its shards have ", expected));
  }
}

void BulkWriter::add(std::span<const std::byte> data) {
  while (!data.empty()) {
    const auto count = std::min(data.size(), kLargePiece - piece_.size());
    piece_.insert(piece_.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(count));
    data = data.subspan(count);
    if (piece_.size() == kLargePiece) finish();
  }
}

void BulkWriter::finish() {
  if (piece_.empty()) return;
  const grpc::Slice slice(piece_.data(), piece_.size());
  piece_.clear();
  if (!write_({&slice, 1})) throw Aborted("the other end has closed the call");
}

void BulkReader::fill(std::span<std::byte> data) {
  while (!data.empty()) {
    if (slice_ == slices_.size()) {
      grpc::ByteBuffer frame;
      slices_.clear();
      slice_ = 0;
      if (!read_(frame) || !frame.Dump(&slices_).ok()) throw InvalidArgument("fewer bytes were sent than announced");
      continue;
    }
    const auto& slice = slices_[slice_];
    const auto count = std::min(data.size(), slice.size() - offset_);
    if (count > 0) std::memcpy(data.data(), slice.begin() + offset_, count);
    data = data.subspan(count);
    offset_ += count;
    if (offset_ == slice.size()) ++slice_, offset_ = 0;
  }
}

namespace {

// Rounds up by at most an eighth, so that a buffer serves calls of nearly equal sizes.
std::size_t rounded(std::size_t bytes) {
  const auto unit = std::max<std::size_t>(64, std::bit_ceil(bytes) / 16);
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::shared_ptr<std::byte[]> ReceiveBuffers::take(std::size_t size) {
  const auto bytes = rounded(size);
  std::unique_ptr<std::byte[]> memory;
  {
    MutexLock lock(state_->mutex);
    auto& free = state_->free;
    const auto found = std::find_if(free.rbegin(), free.rend(), [&](const auto& kept) { return kept.bytes == bytes; });
    if (found != free.rend()) {
      memory = std::move(found->memory);
      free.erase(std::prev(found.base()));
    }
  }
  if (memory == nullptr) memory.reset(new std::byte[bytes]);
  return {memory.release(), [state = state_, bytes](std::byte* given) {
            std::unique_ptr<std::byte[]> back(given);
            MutexLock lock(state->mutex);
            if (state->free.size() == State::kMost) state->free.erase(state->free.begin());
            state->free.push_back({bytes, std::move(back)});
          }};
}

Parts::Parts(const std::vector<std::size_t>& sizes, ReceiveBuffers& buffers) {
  const auto room_for = [](std::size_t size) { return (size + 63) / 64 * 64; };
  std::size_t total = 0;
  for (const auto size : sizes) total += room_for(size);
  memory = buffers.take(total);
  auto* at = memory.get();
  for (const auto size : sizes) {
    parts.emplace_back(at, size);
    at += room_for(size);
  }
}

Parts read_parts(const std::vector<std::size_t>& sizes, const std::vector<bool>& rounded, ReceiveBuffers& buffers,
                 const std::function<bool(grpc::ByteBuffer&)>& read) {
  Parts result(sizes, buffers);
  if (std::find(rounded.begin(), rounded.end(), true) == rounded.end()) {
    read_bulk(result.parts, read);
    return result;
  }
  auto sent = sizes;
  for (std::size_t i = 0; i < sizes.size(); ++i) sent[i] /= rounded[i] ? 2 : 1;
  const Parts received(sent, buffers);
  read_bulk(received.parts, read);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (rounded[i]) {
      from_bfloat16(received.parts[i], result.parts[i]);
    } else {
      std::copy_n(received.parts[i].begin(), sizes[i], result.parts[i].begin());
    }
  }
  return result;
}

grpc::Status status_of_exception() {
  try {
    throw;
  } catch (const UnknownBlock& error) {
    return {grpc::StatusCode::FAILED_PRECONDITION, error.what()};
  } catch (const InvalidArgument& error) {
    return {grpc::StatusCode::INVALID_ARGUMENT, error.what()};
  } catch (const DeadlineExceeded& error) {
    return {grpc::StatusCode::DEADLINE_EXCEEDED, error.what()};
  } catch (const Aborted& error) {
    return {grpc::StatusCode::UNAVAILABLE, error.what()};
  } catch (const ClusterError& error) {
    return {grpc::StatusCode::UNAUTHENTICATED, error.what()};
  } catch (const std::exception& error) {
    return {grpc::StatusCode::INTERNAL, error.what()};
  }
}

bool may_come_back(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE || status.error_code() == grpc::StatusCode::CANCELLED;
}

void throw_status(const grpc::Status& status, const std::string& who) {
  const auto what = text(who, ": ", status.error_message());
  switch (status.error_code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::RESOURCE_EXHAUSTED: throw InvalidArgument(what);
    case grpc::StatusCode::FAILED_PRECONDITION: throw UnknownBlock(what);
    case grpc::StatusCode::UNAUTHENTICATED: throw ClusterError(what);
    default: throw Error(what);
  }
}

}  // namespace lockstep::grpc_service
