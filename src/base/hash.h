// Well-spread 64-bit numbers from integers and texts, and a thread's own sequence of seeds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace lockstep {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose output bits all depend on all input bits.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A seed that depends on every argument and on their order.
template <class... Rest>
constexpr std::uint64_t mix(std::uint64_t first, Rest... rest) {
  std::uint64_t state = mix(first);
  ((state = mix(state ^ static_cast<std::uint64_t>(rest))), ...);
  return state;
}

// Returns the hash of a text, equal in all processes.
inline std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = text.size();
  for (std::size_t i = 0; i < text.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
    hash = mix(hash, word);
  }
  return hash;
}

// Gives a thread its own sequence of seeds within a scope. While it lives, next_random_seed in this thread draws from a
// sequence that begins with `seed`; the innermost holds.
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
