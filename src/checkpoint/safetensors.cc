#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <sstream>

#include "base/text.h"
#include "checkpoint/atomic_file.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/streamed_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

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
