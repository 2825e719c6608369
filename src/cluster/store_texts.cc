#include "cluster/store_texts.h"

#include <cstdint>

#include "base/text.h"

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

namespace {

constexpr std::size_t kPiece = 1 << 19;

std::string key(const std::string& kind, std::int64_t number) { return text("published/", kind, "/", number); }
std::string counter(const std::string& kind) { return text("published/", kind); }

}  // namespace

void publish_text(const Store& store, const std::string& kind, const std::string& text_of_it, Deadline deadline) {
  const auto mine = key(kind, store.add(counter(kind), 1, deadline));
  std::int64_t pieces = 0;
  for (std::size_t at = 0; at < text_of_it.size(); at += kPiece) {
    store.set(text(mine, "/", pieces++), text_of_it.substr(at, kPiece), deadline);
  }
  store.set(mine, std::to_string(pieces), deadline);
}

std::vector<std::string> published_texts(const Store& store, const std::string& kind, Deadline deadline) {
  std::vector<std::string> all;
  const auto count = store.add(counter(kind), 0, deadline);
  for (std::int64_t number = 1; number <= count; ++number) {
    const auto one = key(kind, number);
    const auto pieces = whole_number(store.compare_set(one, "", "", deadline));  // none where the text is not complete
    if (!pieces) continue;
    std::string whole;
    for (std::int64_t k = 0; k < *pieces; ++k) whole += store.get(text(one, "/", k), deadline);
    all.push_back(std::move(whole));
  }
  return all;
}

}  // namespace lockstep::cluster
