#include "lockstep/base/error.h"

#include <cstring>

#include "base/text.h"

namespace lockstep {

namespace {

// Where `detail` says it, nothing.
std::string waited_for_whom(const std::vector<int>& ranks, const std::string& detail) {
  if (ranks.empty()) return detail.empty() ? ": another rank has not come" : "";
  return text(ranks.size() == 1 ? ": rank " : ": ranks ", join(ranks), ranks.size() == 1 ? " has" : " have",
              " not come");
}

}  // namespace

DeadlineExceeded::DeadlineExceeded(const std::string& operation, std::chrono::duration<double> waited_for,
                                   std::vector<int> ranks, const std::string& detail)
    : Error(text(operation, ": gave up after ", waited_for.count(), " s", waited_for_whom(ranks, detail), detail)),
      operation_(operation),
      waited_for_(waited_for),
      ranks_(std::move(ranks)) {}

PeerLost::PeerLost(int rank, std::int64_t generation, const std::string& how)
    : Error(text("lost rank ", rank, " of generation ", generation, ": ", how)),
      rank_(rank),
      generation_(generation),
      how_(how) {}

Interrupted::Interrupted(int signal)
    : Error(text("training was interrupted by ", strsignal(signal), " after a whole step")), signal_(signal) {}

}  // namespace lockstep
