#include <algorithm>
#include <map>

#include "base/text.h"
#include "collective/calls.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/group_wrappers.h"

namespace lockstep {
namespace {

class Checks final : public collective::Wrapper {
 public:
  Checks(std::shared_ptr<GroupBackend> checked, std::int64_t calls)
      : collective::Wrapper(std::move(checked)), calls_(calls), left_(calls) {}

  // The groups that are split from it are checked as well, from their first call on.
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    return std::make_shared<Checks>(collective::Wrapper::make(members, deadline), calls_);
  }

  const char* run(const Call& call, Deadline deadline) override {
    check_call(call, deadline);
    return collective::Wrapper::run(call, deadline);
  }

  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override {
    for (const auto& call : calls) check_call(call, deadline);
    return collective::Wrapper::enqueue(calls, deadline);
  }

 private:
  void check_call(const Call& call, Deadline deadline) {
    if (left_ == 0 || collective::is_message(call)) return;
    if (left_ > 0) --left_;
    collective::on_behalf_of(call, [&] { compare(collective::signature_of(call), deadline); });
  }

  void compare(const collective::Signature& signature, Deadline deadline) {
    auto mine = pack(signature);
    std::vector<collective::SignatureWords> all(static_cast<std::size_t>(size()));
    inner().run(Call::all_gather({mine.data(), mine.size(), DType::int64},
                                 {all.data(), all.size() * mine.size(), DType::int64}),
                deadline);
    std::map<collective::SignatureWords, int> votes;
    for (const auto& words : all) ++votes[words];
    if (votes.size() == 1) return;
    const auto usual = std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) {
                         return a.second < b.second;
                       })->first;
    const bool most = 2 * votes[usual] > size();
    std::string calls;
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (most && all[r] == usual) continue;
      calls += text(calls.empty() ? "" : ", ", "rank ", r, " calls ", collective::signature_in(all[r]).describe());
    }
    if (most) calls += text(", the others call ", collective::signature_in(usual).describe());
    throw InvalidArgument(text("the ranks' calls differ: ", calls));
  }

  const std::int64_t calls_;
  std::int64_t left_;
};

}  // namespace

Group with_checks(const Group& group, std::int64_t calls) {
  return group.with_backend(std::make_shared<Checks>(group.shared_backend(), calls));
}

}  // namespace lockstep
