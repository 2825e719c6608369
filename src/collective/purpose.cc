#include "lockstep/collective/purpose.h"

#include <unordered_map>

#include "base/hash.h"
#include "base/mutex.h"
#include "collective/calls.h"

namespace lockstep {
namespace {

// Beyond so many the words are not kept: errors then say that this rank never had the purpose.
constexpr std::size_t kMostKept = 1 << 16;

constexpr std::uint32_t kBackward = 0x5bd1e9;  // any bits: forward and backward differ by them

class Names {
 public:
  void add(std::uint32_t hash, const std::string& words) {
    MutexLock lock(mutex_);
    if (words_.size() < kMostKept) words_.emplace(hash, words);
  }

  std::string of(std::uint32_t hash) {
    MutexLock lock(mutex_);
    if (const auto found = words_.find(hash); found != words_.end()) return found->second;
    if (const auto found = words_.find(hash ^ kBackward); found != words_.end())
      return "the backward of " + found->second;
    return "a purpose that this rank never had";
  }

 private:
  Mutex mutex_;
  std::unordered_map<std::uint32_t, std::string> words_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Never destroyed: an object of static storage may end later.
Names& names() {
  static auto* const all = new Names;
  return *all;
}

}  // namespace

Purpose::Purpose(const std::string& words) {
  hash_ = static_cast<std::uint32_t>(hash_of(words)) & ((std::uint32_t{1} << kBits) - 1);
  if (hash_ == 0) hash_ = 1;
  names().add(hash_, words);
}

std::string Purpose::words() const { return told() ? names().of(hash_) : "no purpose that was told"; }

Purpose collective::backward_of(Purpose forward) {
  return forward.told() ? Purpose::of_hash(forward.hash() ^ kBackward) : forward;
}

}  // namespace lockstep
