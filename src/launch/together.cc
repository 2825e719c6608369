// The end policy of a job whose processes all do the same, and none of which can do without another.
#include "launch/end_policy.h"

namespace lockstep::launch {
namespace {

class Together : public EndPolicy {
 public:
  Verdict after_failure(const Processes& /*all*/, const Child& /*member*/) override { return {}; }
  std::optional<int> restarts_before_new_start() const override { return 0; }
};

}  // namespace

std::unique_ptr<EndPolicy> end_together() { return std::make_unique<Together>(); }

}  // namespace lockstep::launch
