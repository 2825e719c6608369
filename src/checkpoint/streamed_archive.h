// Archives that may be larger than memory: written and read piece by piece. Their files are those of write_archive.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/safetensors.h"

namespace lockstep::checkpoint {

class ArchiveWriter {
 public:
  // The file at checkpoint_file(path) appears with `finish`, and nothing is left without. Throws IoError.
  ArchiveWriter(const std::string& path, const std::map<std::string, std::string>& entries,
                const std::map<std::string, TensorInfo>& tensors);

  // The bytes of the tensors, one tensor after the other in the order of their names.
  void append(std::span<const std::byte> bytes);

  // Throws Error where not all bytes were given, or too many.
  void finish();

 private:
  AtomicFile file_;
  std::string header_;
  std::uint32_t crc_ = 0;
  std::size_t left_ = 0;  // bytes to come
  std::vector<std::byte> buffer_;
};

// Throws DataError where the file's first bytes are not an archive's.
void require_archive(const std::string& file);

// The header alone of the file at checkpoint_file(path), without a look at the checksum. Throws as read_archive.
Header read_header(const std::string& path);

class ArchiveReader {
 public:
  // Reads the whole file once, to compare it with its checksum. Throws as read_archive.
  explicit ArchiveReader(const std::string& path);

  const Header& header() const { return header_; }

  // Throw InvalidArgument naming what is missing.
  const std::string& entry(const std::string& name) const;
  const TensorInfo& info(const std::string& tensor) const;

  // The tensor's bytes from `offset` on. Throws IoError.
  void read(const std::string& tensor, std::size_t offset, std::span<std::byte> bytes) const;

 private:
  const Header::Tensor& find(const std::string& tensor) const;

  const ReadableFile file_;
  Header header_;
  std::size_t data_begin_ = 0;
};

}  // namespace lockstep::checkpoint
