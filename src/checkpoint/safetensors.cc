// The safetensors format (https://github.com/huggingface/safetensors):
//
//   8 bytes   N, the length of the header, little endian
//   N bytes   JSON, padded with spaces:
//             {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
//   the rest  the tensors' bytes; offsets count from here
//
// Our metadata entry "lockstep.crc32" is the CRC-32 of the whole file as 8 hexadecimal digits, computed with zeros in
// their place. The entry "lockstep.format" says that the checksum must be there.
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/text.h"
#include "checkpoint/atomic_file.h"
#include "checkpoint/safetensors.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using Bytes = std::span<const std::byte>;

constexpr const char* kChecksumKey = "lockstep.crc32";
constexpr const char* kFormatKey = "lockstep.format";
constexpr const char* kNoChecksum = "00000000";
constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kLargestHeader = 100'000'000;  // the format's own bound

struct DtypeName {
  DType dtype;
  const char* name;
};
constexpr std::array kDtypeNames{
    DtypeName{DType::float32, "F32"},   DtypeName{DType::float64, "F64"}, DtypeName{DType::float16, "F16"},
    DtypeName{DType::bfloat16, "BF16"}, DtypeName{DType::int32, "I32"},   DtypeName{DType::int64, "I64"},
    DtypeName{DType::uint8, "U8"},      DtypeName{DType::int8, "I8"},     DtypeName{DType::int16, "I16"},
    DtypeName{DType::boolean, "BOOL"},
};

// The CRC-32 of what came before and of `bytes`. (zlib takes a null pointer, which an empty tensor has, as "begin
// anew".)
std::uint32_t extend_crc(std::uint32_t crc, Bytes bytes) {
  if (bytes.empty()) return crc;
  return static_cast<std::uint32_t>(::crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::uint32_t crc_of(std::initializer_list<Bytes> parts) {
  std::uint32_t crc = 0;
  for (const auto part : parts) crc = extend_crc(crc, part);
  return crc;
}

std::string hex(std::uint32_t value) {
  std::array<char, 9> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x", value);
  return digits.data();
}

Bytes bytes_of(const std::string& characters) { return std::as_bytes(std::span(characters)); }

// Where the checksum's digits begin in a header's text.
std::size_t checksum_position(const std::string& header) {
  const auto key = header.find(text('"', kChecksumKey, "\":\""));
  return key == std::string::npos ? key : key + std::strlen(kChecksumKey) + 4;
}

std::string header_of(const Archive& archive) {
  Json header = Json::object();
  auto& metadata = header["__metadata__"];
  metadata = archive.entries;
  metadata[kChecksumKey] = kNoChecksum;
  metadata[kFormatKey] = "1";
  std::size_t offset = 0;
  for (const auto& [name, tensor] : archive.tensors) {
    const auto* dtype = std::find_if(kDtypeNames.begin(), kDtypeNames.end(),
                                     [wanted = tensor.dtype](const auto& known) { return known.dtype == wanted; });
    header[name] = {
        {"dtype", dtype->name}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string characters;
  try {
    characters = header.dump();
  } catch (const Json::exception& error) {  // dump throws only for text that is not UTF-8
    throw InvalidArgument(text("the names and texts of a checkpoint must be UTF-8: ", error.what()));
  }
  characters.append((8 - characters.size() % 8) % 8, ' ');
  return characters;
}

std::string length_of(const std::string& header) {
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  return length;
}

// The bytes before the tensors' bytes: the header's length, and the header with the checksum of the whole file.
std::string head_of(const Archive& archive) {
  std::string header = header_of(archive);
  const std::string length = length_of(header);
  auto crc = crc_of({bytes_of(length), bytes_of(header)});
  for (const auto& [name, tensor] : archive.tensors) crc = extend_crc(crc, tensor.bytes);
  header.replace(checksum_position(header), 8, hex(crc));
  return length + header;
}

class Reader {
 public:
  Reader(std::string file, Bytes bytes) : file_(std::move(file)), bytes_(bytes) {}

  Archive read() const {
    const std::string header = read_header();
    check_sum(header);
    const Json parsed = Json::parse(header, nullptr, false);
    if (!parsed.is_object()) fail(kLengthBytes, "its header is not a JSON object");
    const Bytes data = bytes_.subspan(kLengthBytes + header.size());
    Archive archive;
    std::vector<Described> tensors;
    for (const auto& [name, value] : parsed.items()) {
      if (name == "__metadata__") {
        read_entries(value, archive);
      } else {
        tensors.push_back(describe(name, value));
      }
    }
    check_offsets(tensors, data.size());
    for (auto& [name, tensor, begin, end] : tensors) {
      const auto stored = data.subspan(begin, end - begin);
      tensor.bytes.assign(stored.begin(), stored.end());
      archive.tensors.emplace(name, std::move(tensor));
    }
    return archive;
  }

 private:
  // A tensor as the header has it, and where its bytes lie.
  struct Described {
    std::string name;
    StoredTensor tensor;
    std::size_t begin = 0, end = 0;
  };

  [[noreturn]] void fail(std::size_t offset, const std::string& what) const {
    throw DataError(text(file_, " is not a whole checkpoint (at byte ", offset, "): ", what));
  }

  std::string read_header() const {
    if (bytes_.size() < kLengthBytes) fail(bytes_.size(), text("it has ", bytes_.size(), " bytes only"));
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < kLengthBytes; ++i) length |= static_cast<std::uint64_t>(bytes_[i]) << (8 * i);
    if (length > kLargestHeader || length > bytes_.size() - kLengthBytes) {
      fail(0, text("its header should have ", length, " bytes, the file has ", bytes_.size()));
    }
    std::string header(reinterpret_cast<const char*>(bytes_.data()) + kLengthBytes, length);
    if (!header.starts_with('{')) fail(kLengthBytes, "its header does not begin with {");
    return header;
  }

  void check_sum(std::string header) const {
    const auto position = checksum_position(header);
    if (position == std::string::npos || position + 8 > header.size()) {
      if (header.find(kFormatKey) != std::string::npos) fail(kLengthBytes, "its checksum is missing: it was altered");
      return;
    }
    const std::string expected = header.substr(position, 8);
    header.replace(position, 8, kNoChecksum);
    const auto found =
        hex(crc_of({bytes_.first(kLengthBytes), bytes_of(header), bytes_.subspan(kLengthBytes + header.size())}));
    if (found != expected) {
      fail(kLengthBytes + position,
           text("its checksum says ", expected, ", its bytes give ", found, ": it was cut or altered"));
    }
  }

  void read_entries(const Json& value, Archive& archive) const {
    if (!value.is_object()) fail(kLengthBytes, "__metadata__ is not an object");
    for (const auto& [key, item] : value.items()) {
      if (!item.is_string()) fail(kLengthBytes, text("__metadata__'s ", key, " is not text"));
      if (key != kChecksumKey && key != kFormatKey) archive.entries.emplace(key, item.get<std::string>());
    }
  }

  Described describe(const std::string& name, const Json& value) const {
    try {
      Described described{name, {}, 0, 0};
      auto& tensor = described.tensor;
      const auto dtype_name = value.at("dtype").get<std::string>();
      const auto* dtype =
          std::find_if(kDtypeNames.begin(), kDtypeNames.end(), [&](auto& d) { return dtype_name == d.name; });
      if (dtype == kDtypeNames.end())
        fail(kLengthBytes, text(name, " has dtype ", dtype_name, ", which Lockstep does not read"));
      tensor.dtype = dtype->dtype;
      std::size_t bytes = size_of(tensor.dtype);
      for (const auto size : whole_numbers(name, value, "shape")) {
        tensor.shape.push_back(static_cast<std::int64_t>(size));
        if (tensor.shape.back() < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
          fail(kLengthBytes, text(name, " has a shape that no tensor has"));
        }
      }
      const auto offsets = whole_numbers(name, value, "data_offsets");
      if (offsets.size() != 2 || offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes) {
        fail(kLengthBytes,
             text("data_offsets of ", name, " are [", join(offsets), "], and its shape needs ", bytes, " bytes"));
      }
      described.begin = offsets[0];
      described.end = offsets[1];
      return described;
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

  // Sorts them as they lie. Each must begin where the one before it ends, and the last end with the file: a rule of
  // the format, without which a small file could name more bytes than there is memory.
  void check_offsets(std::vector<Described>& tensors, std::size_t size) const {
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
    if (at != size) fail(bytes_.size(), text("its header names ", at, " bytes of tensors, but ", size, " follow it"));
  }

  std::string file_;
  Bytes bytes_;
};

}  // namespace

std::string checkpoint_file(const std::string& path) {
  return path.ends_with(".safetensors") ? path : path + ".safetensors";
}

void write_archive(const std::string& path, const Archive& archive) {
  const auto head = head_of(archive);
  std::vector<Bytes> parts{bytes_of(head)};
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
  return checkpoint::parse_archive(file, checkpoint::read_file(file));
}

Archive checkpoint::parse_archive(const std::string& file, Bytes bytes) { return Reader(file, bytes).read(); }

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
