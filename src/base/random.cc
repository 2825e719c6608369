#include "lockstep/base/random.h"

#include "base/hash.h"
#include "base/mutex.h"

namespace lockstep {
namespace {

// Neither made nor destroyed while the program runs: static objects use these too.
constinit Mutex mutex;
constinit std::uint64_t process_seed LOCKSTEP_GUARDED_BY(mutex) = 0, taken LOCKSTEP_GUARDED_BY(mutex) = 0;

thread_local SeedScope* innermost = nullptr;

}  // namespace

SeedScope::SeedScope(std::uint64_t seed) : outer_(innermost), seed_(seed) { innermost = this; }
SeedScope::~SeedScope() { innermost = outer_; }
std::uint64_t SeedScope::next() { return mix(seed_, ++taken_); }

void set_random_seed(std::uint64_t seed) {
  MutexLock lock(mutex);
  process_seed = seed;
  taken = 0;
}

std::uint64_t next_random_seed() {
  if (innermost != nullptr) return innermost->next();
  MutexLock lock(mutex);
  return mix(process_seed, ++taken);
}

}  // namespace lockstep
