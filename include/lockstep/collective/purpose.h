// Purpose: what a call is for. Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// A short hash of words such as "bucket 2 of DistributedDataParallel 1". Ranks' calls agree only when their purposes
// do: calls of one kind and size that are for different things are refused instead of mixed. Errors give the words
// that were named in this process.
//
// Naming takes memory and a lock: name purposes before the steps. A Purpose itself is a number. Any thread.
class Purpose {
 public:
  static constexpr int kBits = 24;

  // Not told. Agrees with itself alone.
  constexpr Purpose() = default;
  explicit Purpose(const std::string& words);

  static constexpr Purpose of_hash(std::uint32_t hash) {
    Purpose purpose;
    purpose.hash_ = hash;
    return purpose;
  }

  std::uint32_t hash() const { return hash_; }
  bool told() const { return hash_ != 0; }
  bool operator==(const Purpose&) const = default;

  // The words, or what stands for them where this process never named it.
  std::string words() const;

 private:
  std::uint32_t hash_ = 0;  // of kBits bits
};

}  // namespace lockstep
