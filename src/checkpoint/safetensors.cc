#include "checkpoint/safetensors.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/streamed_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// The safetensors format (https://github.com/huggingface/safetensors):
//
//   8 bytes   N, the length of the header, little endian
//   N bytes   JSON, padded with spaces:
//             {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
//   the rest  the tensors' bytes; offsets count from here
//
// Our metadata entry "lockstep.crc32" is the CRC-32 of the whole file as 8 hexadecimal digits, computed with zeros in
// their place. The entry "lockstep.format" says that the checksum must be there.

namespace {

using Json = nlohmann::json;
using Bytes = std::span<const std::byte>;

constexpr const char* kChecksumKey = "lockstep.crc32";
constexpr const char* kFormatKey = "lockstep.format";
constexpr const char* kNoChecksum = "00000000";
constexpr std::size_t kLargestHeader = 100'000'000;  // the format's own bound
constexpr int kDeepest = 3;                          // the header, a tensor's entry, its shape

// The format's names, in the order of DType.
constexpr const char* kDtypeNames[] = {"F32", "F64", "F16", "BF16", "I32", "I64", "U8", "I8", "I16", "BOOL"};
static_assert(std::size(kDtypeNames) == kDTypes);

std::string hex(std::uint32_t value) {
  std::array<char, 9> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x", value);
  return digits.data();
}

// Returns where the checksum's digits begin in a header's text.
std::size_t checksum_position(const std::string& header) {
  const auto key = header.find(text('"', kChecksumKey, "\":\""));
  return key == std::string::npos ? key : key + std::strlen(kChecksumKey) + 4;
}

[[noreturn]] void fail(const std::string& file, std::size_t offset, const std::string& what) {
  throw DataError(text(file, " is not a whole checkpoint (at byte ", offset, "): ", what));
}

class Parser {
 public:
  explicit Parser(const std::string& file) : file_(file) {}

  Header parse(const std::string& header, std::size_t data_bytes) {
    const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
      if (depth > kDeepest) fail(kLengthBytes, text("its header is nested deeper than ", kDeepest, " levels"));
      return true;
    };
    const Json parsed = Json::parse(header, shallow, /*allow_exceptions=*/false);
    if (!parsed.is_object()) fail(kLengthBytes, "its header is not a JSON object");
    for (const auto& [name, value] : parsed.items()) {
      if (name == "__metadata__") {
        read_entries(value);
      } else {
        header_.tensors.push_back(describe(name, value));
      }
    }
    check_offsets(header.size(), data_bytes);
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(std::size_t offset, const std::string& what) const { checkpoint::fail(file_, offset, what); }

  void read_entries(const Json& value) {
    if (!value.is_object()) fail(kLengthBytes, "__metadata__ is not an object");
    for (const auto& [key, item] : value.items()) {
      if (!item.is_string()) fail(kLengthBytes, text("__metadata__'s ", key, " is not text"));
      if (key != kChecksumKey && key != kFormatKey) header_.entries.emplace(key, item.get<std::string>());
    }
  }

  Header::Tensor describe(const std::string& name, const Json& value) const {
    try {
      Header::Tensor tensor{.name = name};
      const auto dtype_name = value.at("dtype").get<std::string>();
      const auto* const found = std::find(std::begin(kDtypeNames), std::end(kDtypeNames), dtype_name);
      if (found == std::end(kDtypeNames))
        fail(kLengthBytes, text(name, " has dtype ", dtype_name, ", which Lockstep does not read"));
      tensor.info.dtype = static_cast<DType>(found - std::begin(kDtypeNames));
      std::size_t bytes = size_of(tensor.info.dtype);
      for (const auto size : whole_numbers(name, value, "shape")) {
        tensor.info.shape.push_back(static_cast<std::int64_t>(size));
        if (tensor.info.shape.back() < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
          fail(kLengthBytes, text(name, " has a shape that no tensor has"));
        }
      }
      const auto offsets = whole_numbers(name, value, "data_offsets");
      if (offsets.size() != 2 || offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes) {
        fail(kLengthBytes,
             text("data_offsets of ", name, " are [", join(offsets), "], and its shape needs ", bytes, " bytes"));
      }
      tensor.begin = offsets[0];
      tensor.end = offsets[1];
      return tensor;
    } catch (const Json::exception& error) {
      fail(kLengthBytes, text("the entry of ", name, " is malformed: ", error.what()));
    }
  }

  std::vector<std::size_t> whole_numbers(const std::string& name, const Json& value, const char* key) const {
    std::vector<std::size_t> numbers;
    for (const auto& item : value.at(key)) {
      if (!item.is_number_unsigned()) {
        fail(kLengthBytes, text("the ", key, " of ", name, " has ", item.dump(), " where only whole numbers may be"));
      }
      numbers.push_back(item.get<std::size_t>());
    }
    return numbers;
  }

  // Sorts tensors by their positions. Each must begin where the one before it ends, and the last end with the file.
  // Without this rule of the format a small file could name more bytes than there is memory.
  void check_offsets(std::size_t header_size, std::size_t data_bytes) {
    auto& tensors = header_.tensors;
    std::sort(tensors.begin(), tensors.end(),
              [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    std::size_t at = 0;
    for (const auto& tensor : tensors) {
      if (tensor.begin != at) {
        fail(kLengthBytes, text(tensor.name, " begins at ", tensor.begin, " and what comes before it ends at ", at,
                                ": tensors may neither overlap nor leave a gap"));
      }
      at = tensor.end;
    }
    if (at == data_bytes) return;
    fail(kLengthBytes + header_size + data_bytes,
         text("its header names ", at, " bytes of tensors, but ", data_bytes, " follow it"));
  }

  const std::string& file_;
  Header header_;
};

}  // namespace

std::size_t TensorInfo::bytes() const {
  auto bytes = size_of(dtype);
  for (const auto size : shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

// (zlib takes a null pointer, which an empty tensor has, as "begin anew".)
std::uint32_t extend_crc(std::uint32_t crc, Bytes bytes) {
  if (bytes.empty()) return crc;
  return static_cast<std::uint32_t>(::crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::uint32_t join_crcs(std::uint32_t first, std::uint32_t second, std::size_t bytes) {
  return static_cast<std::uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(bytes)));
}

std::string print_header(const std::map<std::string, std::string>& entries, const NamedTensors& tensors,
                         std::size_t page, std::size_t before) {
  Json header = Json::object();
  auto& metadata = header["__metadata__"];
  metadata = entries;
  metadata[kChecksumKey] = kNoChecksum;
  metadata[kFormatKey] = "1";
  std::size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto end = offset + tensor.bytes();
    header[name] = {{"dtype", kDtypeNames[static_cast<std::size_t>(tensor.dtype)]},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string characters;
  try {
    characters = header.dump();
  } catch (const Json::exception& error) {  // dump throws only for text that is not UTF-8
    throw InvalidArgument(text("the names and texts of a checkpoint must be UTF-8: ", error.what()));
  }
  characters.append((page - (kLengthBytes + characters.size() + before) % page) % page, ' ');
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<char>(characters.size() >> (8 * i));
  return length + characters;
}

bool says_own_format(const std::string& header) {
  return header.starts_with('{') && header.find(text('"', kFormatKey, "\":")) != std::string::npos;
}

void set_checksum(std::string& header, std::uint32_t crc) { header.replace(checksum_position(header), 8, hex(crc)); }

std::size_t header_bytes(const std::string& file, Bytes length, std::size_t file_bytes) {
  if (file_bytes < kLengthBytes) fail(file, file_bytes, text("it has ", file_bytes, " bytes only"));
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) bytes |= static_cast<std::uint64_t>(length[i]) << (8 * i);
  if (bytes <= kLargestHeader && bytes <= file_bytes - kLengthBytes) return bytes;
  fail(file, 0, text("its header should have ", bytes, " bytes, the file has ", file_bytes));
}

FileChecksum::FileChecksum(std::string file, Bytes length, const std::string& header) : file_(std::move(file)) {
  if (!header.starts_with('{')) fail(file_, kLengthBytes, "its header does not begin with {");
  const auto position = checksum_position(header);
  auto summed = header;
  if (position != std::string::npos && position + 8 <= header.size()) {
    position_ = kLengthBytes + position;
    expected_ = header.substr(position, 8);
    summed.replace(position, 8, kNoChecksum);
  } else if (header.find(kFormatKey) != std::string::npos) {
    fail(file_, kLengthBytes, "its checksum is missing: it was altered");
  }
  crc_ = extend_crc(extend_crc(0, length), std::as_bytes(std::span(summed)));
}

void FileChecksum::check() const {
  if (expected_.empty() || hex(crc_) == expected_) return;
  fail(file_, position_,
       text("its checksum says ", expected_, ", its bytes give ", hex(crc_), ": it was cut or altered"));
}

Header parse_header(const std::string& file, const std::string& header, std::size_t data_bytes) {
  return Parser(file).parse(header, data_bytes);
}

}  // namespace lockstep::checkpoint

namespace lockstep {

namespace {

using Bytes = std::span<const std::byte>;
using namespace checkpoint;

// The bytes before the tensors' bytes: the header's length, and the header with the checksum of the whole file.
std::string head_of(const Archive& archive) {
  NamedTensors infos;
  for (const auto& [name, tensor] : archive.tensors) infos.emplace_back(name, TensorInfo{tensor.dtype, tensor.shape});
  auto header = print_header(archive.entries, infos);
  auto crc = extend_crc(0, std::as_bytes(std::span(header)));
  for (const auto& [name, tensor] : archive.tensors) crc = extend_crc(crc, tensor.bytes);
  set_checksum(header, crc);
  return header;
}

}  // namespace

std::string checkpoint_file(const std::string& path) {
  return path.ends_with(".safetensors") ? path : path + ".safetensors";
}

void write_archive(const std::string& path, const Archive& archive) {
  const auto head = head_of(archive);
  std::vector<Bytes> parts{std::as_bytes(std::span(head))};
  for (const auto& [name, tensor] : archive.tensors) parts.emplace_back(tensor.bytes);
  checkpoint::write_file_atomically(checkpoint_file(path), parts);
}

std::string checkpoint::print_archive(const Archive& archive) {
  auto all = head_of(archive);
  for (const auto& [name, tensor] : archive.tensors) {
    all.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return all;
}

Archive read_archive(const std::string& path) {
  const std::string file = checkpoint_file(path);
  checkpoint::require_archive(file);  // before memory is taken for the whole file
  return checkpoint::parse_archive(file, checkpoint::read_file(file));
}

Archive checkpoint::parse_archive(const std::string& file, Bytes bytes) {
  const auto length = bytes.first(std::min(bytes.size(), kLengthBytes));
  const auto header_size = header_bytes(file, length, bytes.size());
  const std::string header(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, header_size);
  const auto data = bytes.subspan(kLengthBytes + header_size);
  FileChecksum checksum(file, length, header);
  checksum.extend(data);
  checksum.check();
  auto parsed = parse_header(file, header, data.size());
  Archive archive{.tensors = {}, .entries = std::move(parsed.entries)};
  for (auto& [name, info, begin, end] : parsed.tensors) {
    const auto stored = data.subspan(begin, end - begin);
    archive.tensors[name] = {info.dtype, std::move(info.shape), {stored.begin(), stored.end()}};
  }
  return archive;
}

const StoredTensor& Archive::tensor(const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw InvalidArgument(text("the checkpoint has no tensor \"", name, "\""));
  return found->second;
}

const std::string& Archive::entry(const std::string& name) const {
  const auto found = entries.find(name);
  if (found == entries.end()) throw InvalidArgument(text("the checkpoint has no entry \"", name, "\""));
  return found->second;
}

std::int64_t Archive::integer(const std::string& name) const {
  const auto& digits = entry(name);
  const auto value = whole_number(digits);
  if (value) return *value;
  throw DataError(text("the checkpoint's entry \"", name, "\" is \"", digits, "\"; it must be a whole number"));
}

double Archive::number(const std::string& name) const {
  const auto all = numbers(name);
  if (all.size() == 1) return all[0];
  throw DataError(text("the checkpoint's entry \"", name, "\" has ", all.size(), " numbers; it must have 1"));
}

std::vector<double> Archive::numbers(const std::string& name) const {
  std::vector<double> values;
  std::istringstream words(entry(name));
  for (std::string word; words >> word;) {
    char* end = nullptr;
    values.push_back(std::strtod(word.c_str(), &end));
    if (end == word.c_str() + word.size()) continue;
    throw DataError(text("the checkpoint's entry \"", name, "\" has \"", word, "\" where a number must be"));
  }
  return values;
}

void Archive::set_numbers(const std::string& name, const std::vector<double>& values) {
  auto& line = entries[name];
  line.clear();
  for (const double value : values) line += text(std::hexfloat, value, ' ');
}

}  // namespace lockstep
