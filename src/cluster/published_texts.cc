#include "cluster/published_texts.h"

#include "base/text.h"

namespace lockstep::cluster {
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
