#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "base/text.h"
#include "collective/calls.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/group_wrappers.h"

namespace lockstep {
namespace {

using Words = std::array<std::int64_t, 3>;

Words words_of(const Signature& signature) {
  return {static_cast<std::int64_t>(signature.kind) | static_cast<std::int64_t>(signature.dtype) << 8 |
              static_cast<std::int64_t>(signature.op) << 16,
          signature.peer, static_cast<std::int64_t>(signature.shape)};
}

Signature signature_in(const Words& words) {
  return {static_cast<Call::Kind>(words[0] & 0xff), static_cast<DType>(words[0] >> 8 & 0xff),
          static_cast<ReduceOp>(words[0] >> 16 & 0xff), static_cast<std::int32_t>(words[1]),
          static_cast<std::uint64_t>(words[2])};
}

class Checks final : public Wrapper {
 public:
  Checks(std::shared_ptr<GroupBackend> checked, std::int64_t calls) : Wrapper(std::move(checked)), left_(calls) {}

  const char* run(const Call& call, Deadline deadline) override {
    if (left_ != 0 && !is_message(call)) {
      if (left_ > 0) --left_;
      compare(signature_of(call), deadline);
    }
    return Wrapper::run(call, deadline);
  }

 private:
  void compare(const Signature& signature, Deadline deadline) {
    auto mine = words_of(signature);
    std::vector<Words> all(static_cast<std::size_t>(size()));
    inner().run(Call::all_gather({mine.data(), mine.size(), DType::int64},
                                 {all.data(), all.size() * mine.size(), DType::int64}),
                deadline);
    std::map<Words, int> votes;
    for (const auto& words : all) ++votes[words];
    if (votes.size() == 1) return;
    const auto usual = std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) {
                         return a.second < b.second;
                       })->first;
    std::string others;
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r] != usual) others += text(", rank ", r, " calls ", signature_in(all[r]).describe());
    }
    throw InvalidArgument(text("the ranks' calls differ: most call ", signature_in(usual).describe(), others));
  }

  std::int64_t left_;
};

}  // namespace

Group with_checks(const Group& group, std::int64_t calls) {
  return group.with_backend(std::make_shared<Checks>(group.shared_backend(), calls));
}

}  // namespace lockstep
