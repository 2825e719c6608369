#include "strategy/check_elastic.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::strategy {

void check(const std::string& strategy, const ElasticOptions& options) {
  const auto fail = [&](const auto&... what) { throw InvalidArgument(text(strategy, ": elastic.", what...)); };
  if (options.min_workers < 1) fail("min_workers is ", options.min_workers, "; it must be 1 or more");
  if (!(options.regroup_seconds > 0)) fail("regroup_seconds is ", options.regroup_seconds, "; it must be above 0");
  if (!(options.lost_host_seconds >= 3 && options.lost_host_seconds <= kLongestLostHostSeconds)) {
    fail("lost_host_seconds is ", options.lost_host_seconds, "; it must be from 3 to ", kLongestLostHostSeconds);
  }
  if (!(options.join_seconds >= 0)) fail("join_seconds is ", options.join_seconds, "; it must be 0 or more");
  const auto& batch = options.worker_batch;
  if (batch && batch->learning_rate_workers < 1) {
    fail("worker_batch.learning_rate_workers is ", batch->learning_rate_workers, "; it must be 1 or more");
  }
  if (batch && !batch->scaling) fail("worker_batch.scaling is null");
}

}  // namespace lockstep::strategy
