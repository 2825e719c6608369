#include "lockstep/base/random.h"

#include "base/hash.h"
#include "base/mutex.h"

namespace lockstep {
namespace {

struct Sequence {
  Mutex mutex;
  std::uint64_t seed LOCKSTEP_GUARDED_BY(mutex) = 0;
  std::uint64_t taken LOCKSTEP_GUARDED_BY(mutex) = 0;
};

Sequence& sequence() {
  static auto* const instance = new Sequence();  // never destroyed: used by static objects too
  return *instance;
}

thread_local SeedScope* innermost = nullptr;

}  // namespace

SeedScope::SeedScope(std::uint64_t seed) : outer_(innermost), seed_(seed) { innermost = this; }
SeedScope::~SeedScope() { innermost = outer_; }
std::uint64_t SeedScope::next() { return mix(seed_, ++taken_); }

void set_random_seed(std::uint64_t seed) {
  auto& s = sequence();
  MutexLock lock(s.mutex);
  s.seed = seed;
  s.taken = 0;
}

std::uint64_t next_random_seed() {
  if (innermost != nullptr) return innermost->next();
  auto& s = sequence();
  MutexLock lock(s.mutex);
  return mix(s.seed, ++s.taken);
}

}  // namespace lockstep
