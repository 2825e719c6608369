#include "cluster/strings.h"

#include <cstdint>
#include <cstring>

namespace lockstep::cluster {
namespace {

void put(std::string& out, std::size_t number) {
  const auto value = static_cast<std::uint32_t>(number);
  for (int shift = 0; shift < 32; shift += 8) out += static_cast<char>(value >> shift & 0xff);
}

bool take(std::string_view& bytes, std::size_t& number) {
  if (bytes.size() < 4) return false;
  number = 0;
  for (std::size_t i = 0; i < 4; ++i) number |= std::size_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  bytes.remove_prefix(4);
  return true;
}

}  // namespace

std::string pack(const std::vector<std::string>& items) {
  std::string out;
  put(out, items.size());
  for (const auto& item : items) {
    put(out, item.size());
    out += item;
  }
  return out;
}

std::optional<std::vector<std::string>> unpack(std::string_view bytes) {
  std::size_t count = 0;
  if (!take(bytes, count)) return std::nullopt;
  std::vector<std::string> items;
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t length = 0;
    if (!take(bytes, length) || bytes.size() < length) return std::nullopt;
    items.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(length);
  }
  if (!bytes.empty()) return std::nullopt;
  return items;
}

}  // namespace lockstep::cluster
