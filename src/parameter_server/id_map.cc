#include "parameter_server/id_map.h"

namespace lockstep::parameter_server {

std::uint32_t& IdMap::place(std::int64_t id, std::uint32_t number) {
  auto at = place_of(id);
  while (entries_[at].used) at = next(at);
  entries_[at] = {id, number, true};
  return entries_[at].number;
}

void IdMap::grow() {
  std::vector<Entry> old(2 * entries_.size());
  old.swap(entries_);
  --shift_;
  for (const auto& entry : old) {
    if (entry.used) place(entry.id, entry.number);
  }
}

// Entries after the gap move up unless they then lie before their own place (Knuth, TAOCP 6.4, algorithm R).
void IdMap::erase(std::int64_t id) {
  auto gap = place_of(id);
  while (entries_[gap].used && entries_[gap].id != id) gap = next(gap);
  if (!entries_[gap].used) return;
  for (auto at = next(gap); entries_[at].used; at = next(at)) {
    const auto mask = entries_.size() - 1;
    const auto from_own_place = (at - place_of(entries_[at].id)) & mask;
    const auto from_gap = (at - gap) & mask;
    if (from_own_place < from_gap) continue;
    entries_[gap] = entries_[at];
    gap = at;
  }
  entries_[gap].used = false;
  --size_;
}

}  // namespace lockstep::parameter_server
