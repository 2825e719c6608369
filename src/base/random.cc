#include "lockstep/base/random.h"

#include "base/hash.h"
#include "base/mutex.h"

namespace lockstep {
namespace {

// Neither made nor destroyed while the program runs: static objects use these too.
constinit Mutex seeds_mutex;
constinit std::uint64_t process_seed LOCKSTEP_GUARDED_BY(seeds_mutex) = 0;
constinit std::uint64_t seeds_taken LOCKSTEP_GUARDED_BY(seeds_mutex) = 0;

thread_local SeedScope* innermost = nullptr;

}  // namespace

SeedScope::SeedScope(std::uint64_t seed) : outer_(innermost), seed_(seed) { innermost = this; }
SeedScope::~SeedScope() { innermost = outer_; }
std::uint64_t SeedScope::next() { return mix(seed_, ++taken_); }

void set_random_seed(std::uint64_t seed) {
  MutexLock lock(seeds_mutex);
  process_seed = seed;
  seeds_taken = 0;
}

std::uint64_t next_random_seed() {
  if (innermost != nullptr) return innermost->next();
  MutexLock lock(seeds_mutex);
  return mix(process_seed, ++seeds_taken);
}

}  // namespace lockstep
