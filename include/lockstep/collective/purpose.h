// Purpose: what a call is for. Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// A hash of 24 bits of words such as "bucket 2 of DistributedDataParallel 1". Ranks' calls agree only when their
// purposes do. So calls of one kind and size that are for different things are not mixed, but refused with
// InvalidArgument. Errors give the words that were named in this process.
//
// Naming takes memory and a lock: name purposes before the steps. A Purpose itself is a number, which is cheap to copy.
// Any thread.
class Purpose {
 public:
  static constexpr int kBits = 24;

  // No purpose, which agrees only with no purpose.
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

  // The words; where this process never named the purpose, a text that says so.
  std::string words() const;

 private:
  std::uint32_t hash_ = 0;  // of kBits bits
};

}  // namespace lockstep
