// Gives a thread its own sequence of seeds within a scope.
#pragma once

#include <cstdint>

namespace lockstep {

// While it lives, next_random_seed in this thread draws from a sequence that begins with `seed`; the innermost holds.
class SeedScope {
 public:
  explicit SeedScope(std::uint64_t seed);
  ~SeedScope();
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;

  std::uint64_t next();

 private:
  SeedScope* const outer_;
  const std::uint64_t seed_;
  std::uint64_t taken_ = 0;
};

}  // namespace lockstep
