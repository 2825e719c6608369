// Checkpoints that somebody else wrote, or changed: the file, and what is read from its entries.
#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace lockstep {
namespace {

// The bytes as a header of the right length, and so many zeros as tensors: so that findings come past the first checks.
std::string file_with(const std::string& header, std::size_t tensors) {
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) file += static_cast<char>(header.size() >> shift & 0xff);
  return file + header + std::string(tensors, '\0');
}

template <class Read>
void try_to(const Read& read) {
  try {
    read();
  } catch (const Error&) {
  }
}

void read_entries(const Archive& archive) {
  for (const auto& [name, entry] : archive.entries) {
    try_to([&, key = name] { archive.integer(key); });
    try_to([&, key = name] { archive.numbers(key); });
    try_to([&, key = name] { load_kept(archive, key, "folder"); });
  }
}

}  // namespace

void fuzz(const std::string& bytes) {
  if (bytes.empty() || bytes.size() > 65536) return;
  const auto rest = bytes.substr(1);
  const auto file = bytes[0] % 2 == 0 ? rest : file_with(rest, static_cast<unsigned char>(bytes[0]));
  const auto archive = checkpoint::parse_archive("fuzzed", std::as_bytes(std::span(file)));
  std::size_t total = 0;
  for (const auto& [name, tensor] : archive.tensors) total += tensor.bytes.size();
  if (total > file.size()) __builtin_trap();  // no tensor shares its bytes with another
  read_entries(archive);
}

}  // namespace lockstep
