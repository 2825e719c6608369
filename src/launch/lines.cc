#include "launch/lines.h"

namespace lockstep::launch {

void Lines::add(const char* bytes, std::size_t count, const Take& take) {
  for (std::size_t i = 0; i < count; ++i) {
    if (bytes[i] != '\n') begun_.push_back(bytes[i]);
    if (bytes[i] != '\n' && begun_.size() < longest_) continue;
    take(begun_);
    begun_.clear();
  }
}

void Lines::finish(const Take& take) {
  if (!begun_.empty()) take(begun_);
  begun_.clear();
}

}  // namespace lockstep::launch
