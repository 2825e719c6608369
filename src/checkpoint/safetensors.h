// The safetensors format. The header comes before the tensors' bytes. An archive becomes the bytes of a file. A survey
// tells what a checkpoint holds, without its values in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/buffer.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

inline constexpr std::size_t kLengthBytes = 8;  // of the header's length, which stands first

struct TensorInfo {
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;
  std::size_t bytes() const;
};

// The CRC-32 of what came before and of `bytes`; and that of two pieces, of which the second has `bytes`.
std::uint32_t extend_crc(std::uint32_t crc, std::span<const std::byte> bytes);
std::uint32_t join_crcs(std::uint32_t first, std::uint32_t second, std::size_t bytes);

// Length and header, for tensors that lie in this order. The header is padded so that the byte that follows `before`
// bytes of tensors is at a multiple of `page` in the file. Throws InvalidArgument where a name or a text is no UTF-8.
// set_checksum is then called with the CRC-32 of this text, as it is, and of all that follows it.
using NamedTensors = std::vector<std::pair<std::string, TensorInfo>>;
std::string print_header(const std::map<std::string, std::string>& entries, const NamedTensors& tensors,
                         std::size_t page = 8, std::size_t before = 0);
void set_checksum(std::string& header, std::uint32_t crc);

// True where a header's text is of a file that Lockstep wrote.
bool says_own_format(const std::string& header);

// Returns the length of the header of a file that begins with `length` and has `file_bytes`; `file` is for messages.
// Throws DataError where the file cannot have it.
std::size_t header_bytes(const std::string& file, std::span<const std::byte> length, std::size_t file_bytes);

// Compares a file with the checksum in its header, where that has one.
class FileChecksum {
 public:
  FileChecksum(std::string file, std::span<const std::byte> length, const std::string& header);
  void extend(std::span<const std::byte> bytes) { crc_ = extend_crc(crc_, bytes); }  // by what follows

  // Once the whole file was given. Throws DataError where it was altered.
  void check() const;

 private:
  const std::string file_;
  std::string expected_;  // empty: the file has none
  std::size_t position_ = 0;
  std::uint32_t crc_ = 0;
};

struct Header {
  struct Tensor {
    std::string name;
    TensorInfo info;
    std::size_t begin = 0, end = 0;  // after the header
  };
  std::vector<Tensor> tensors;  // as they lie
  std::map<std::string, std::string> entries;
};

// Throws DataError, with the offset, for what is no header of `data_bytes` of tensors.
Header parse_header(const std::string& file, const std::string& header, std::size_t data_bytes);

// The bytes that write_archive writes.
std::string print_archive(const Archive& archive);

// Parses a file's bytes as read_archive does; `file` is for messages.
Archive parse_archive(const std::string& file, std::span<const std::byte> bytes);

struct Survey {
  std::map<std::string, std::string> entries;  // of the main file
  std::map<std::string, TensorInfo> tensors;   // those in several files as if they were in one
  std::set<std::filesystem::path> files;       // with rows, beside the main file
};

// Reads all files of the checkpoint once, and compares them with their checksums. Throws as read_archive, and
// DataError, naming the file, where one with rows is missing, damaged, or has other rows than the main file lists.
Survey survey(const std::string& path);

}  // namespace lockstep::checkpoint
