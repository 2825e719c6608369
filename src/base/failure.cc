#include "base/failure.h"

#include <algorithm>
#include <chrono>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

template <std::size_t N>
void copy_text(std::array<char, N>& to, const std::string& from) {
  const auto length = std::min(from.size(), N - 1);
  std::copy_n(from.begin(), length, to.begin());
  to[length] = '\0';
}

}  // namespace

Failure Failure::aborted(int reporter, const std::string& reason) {
  Failure failure;
  failure.reporter = reporter;
  copy_text(failure.reason, reason.empty() ? "no reason was given" : reason);
  return failure;
}

Failure Failure::peer_lost(int reporter, int rank, const std::string& how) {
  Failure failure = aborted(reporter, how);
  failure.kind = Kind::peer_lost;
  failure.rank_count = 1;
  failure.ranks[0] = rank;
  return failure;
}

Failure Failure::deadline(int reporter, const std::vector<int>& ranks, double seconds, const std::string& operation) {
  Failure failure;
  failure.kind = Kind::deadline;
  failure.reporter = reporter;
  failure.rank_count = static_cast<std::uint32_t>(std::min(ranks.size(), kMostRanks));
  std::copy_n(ranks.begin(), failure.rank_count, failure.ranks.begin());
  failure.seconds = seconds;
  copy_text(failure.operation, operation);
  return failure;
}

std::vector<int> Failure::blamed() const { return {ranks.begin(), ranks.begin() + rank_count}; }

Failure Failure::checked(int size) const {
  Failure good = *this;
  if (kind > Kind::deadline) good.kind = Kind::aborted;
  good.rank_count = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(rank_count, kMostRanks); ++i) {
    if (ranks[i] >= 0 && ranks[i] < size) good.ranks[good.rank_count++] = ranks[i];
  }
  if (good.kind == Kind::peer_lost && good.rank_count == 0) good.kind = Kind::aborted;
  good.operation.back() = good.reason.back() = '\0';
  return good;
}

void Failure::raise(int rank, std::int64_t generation) const {
  switch (kind) {
    case Kind::peer_lost: throw PeerLost(ranks[0], generation, reason.data());
    case Kind::deadline:
      throw DeadlineExceeded(operation.data(), std::chrono::duration<double>(seconds), blamed(),
                             reporter == rank ? "" : text(", as rank ", reporter, " reports"));
    case Kind::aborted: break;
  }
  throw Aborted(text("the group was aborted: ", reason.data()));
}

}  // namespace lockstep
