#include "launch/lines.h"

namespace lockstep::launch {

void Lines::add(const char* bytes, std::size_t count, const Take& take) {
  for (std::size_t i = 0; i < count; ++i) {
    const bool returns = options_.redraws && bytes[i] == '\r' && !(i + 1 < count && bytes[i + 1] == '\n');
    const bool ends = returns || bytes[i] == '\n';
    if (!ends) begun_.push_back(bytes[i]);
    if (!ends && begun_.size() < options_.longest) continue;
    take(begun_, returns);
    begun_.clear();
  }
}

void Lines::finish(const Take& take) {
  if (!begun_.empty()) take(begun_, false);
  begun_.clear();
}

}  // namespace lockstep::launch
