#include "checkpoint/streamed_archive.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;  // bytes that are written or read at a time

// The bytes of the header's length, and the header's text.
std::pair<std::vector<std::byte>, std::string> head_of(const ReadableFile& file) {
  std::vector<std::byte> length(std::min(kLengthBytes, file.size()));
  file.read(0, length);
  std::string header(header_bytes(file.path(), length, file.size()), ' ');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  return {std::move(length), std::move(header)};
}

}  // namespace

void require_archive(const std::string& file) {
  const auto [length, header] = head_of(ReadableFile(file));
  FileChecksum(file, length, header);
}

Header read_header(const std::string& path) {
  const ReadableFile file(checkpoint_file(path));
  const auto header = head_of(file).second;
  return parse_header(file.path(), header, file.size() - kLengthBytes - header.size());
}

ArchiveWriter::ArchiveWriter(const std::string& path, const std::map<std::string, std::string>& entries,
                             const std::map<std::string, TensorInfo>& tensors)
    : file_(checkpoint_file(path)), header_(print_header(entries, {tensors.begin(), tensors.end()})) {
  for (const auto& [name, tensor] : tensors) left_ += tensor.bytes();
  const auto header = std::as_bytes(std::span(header_));
  crc_ = extend_crc(0, header);
  file_.append(header);
}

void ArchiveWriter::append(std::span<const std::byte> bytes) {
  if (bytes.size() > left_) throw Error(text("an archive gets ", bytes.size() - left_, " bytes too many"));
  left_ -= bytes.size();
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  if (buffer_.size() < kPiece && left_ > 0) return;
  crc_ = extend_crc(crc_, buffer_);
  file_.append(buffer_);
  buffer_.clear();
}

void ArchiveWriter::finish() {
  if (left_ > 0) throw Error(text("an archive is finished ", left_, " bytes too early"));
  set_checksum(header_, crc_);
  file_.write_at(0, std::as_bytes(std::span(header_)));
  file_.commit();
}

ArchiveReader::ArchiveReader(const std::string& path) : file_(checkpoint_file(path)) {
  const auto name = checkpoint_file(path);
  const auto [length, header] = head_of(file_);
  data_begin_ = kLengthBytes + header.size();
  FileChecksum checksum(name, length, header);
  std::vector<std::byte> piece(kPiece);
  for (auto at = data_begin_; at < file_.size(); at += piece.size()) {
    piece.resize(std::min(kPiece, file_.size() - at));
    file_.read(at, piece);
    checksum.extend(piece);
  }
  checksum.check();
  header_ = parse_header(name, header, file_.size() - data_begin_);
}

const Header::Tensor& ArchiveReader::find(const std::string& tensor) const {
  const auto found = std::find_if(header_.tensors.begin(), header_.tensors.end(),
                                  [&](const auto& described) { return described.name == tensor; });
  if (found == header_.tensors.end()) {
    throw InvalidArgument(text("the checkpoint ", file_.path(), " has no tensor \"", tensor, "\""));
  }
  return *found;
}

const std::string& ArchiveReader::entry(const std::string& name) const {
  const auto found = header_.entries.find(name);
  if (found != header_.entries.end()) return found->second;
  throw InvalidArgument(text("the checkpoint ", file_.path(), " has no entry \"", name, "\""));
}

const TensorInfo& ArchiveReader::info(const std::string& tensor) const { return find(tensor).info; }

void ArchiveReader::read(const std::string& tensor, std::size_t offset, std::span<std::byte> bytes) const {
  file_.read(data_begin_ + find(tensor).begin + offset, bytes);
}

}  // namespace lockstep::checkpoint
