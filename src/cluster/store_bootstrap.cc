#include "cluster/bootstrap.h"

#include <unistd.h>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/connections.h"

namespace lockstep::cluster {
namespace {

// For the last messages to the other ranks, when a call's own deadline may have passed.
Deadline for_last_words() { return Deadline::after(std::chrono::seconds(1)); }

// Containers of one host may have equal host names and process ids: a random name tells them apart.
std::string this_process() {
  static const std::string unique = transport::random_name();
  return text("process ", getpid(), " of ", name_of_this_host(), " (", unique.substr(0, 8), ")");
}

std::string generation_of(int rank) { return text("generation of rank ", rank); }

}  // namespace

StoreBootstrap::StoreBootstrap(const World& world, Store store, Deadline deadline)
    : world_(world), store_(std::move(store)), generation_(text("generation ", world.generation, "/")) {
  const auto me = this_process();
  const auto holder = store_.compare_set(text(generation_, "process of rank ", rank()), "", me, deadline);
  if (holder != me) {
    refuse(text("World: rank ", rank(), " of generation ", generation(), " is ", holder, "; ", me,
                " was given the same rank"));
  }
  const auto mine = std::to_string(size());
  const auto theirs = store_.compare_set(generation_ + "size", "", mine, deadline);
  if (theirs != mine) {
    refuse(text("World: rank ", rank(), " (", me, ") says that there are ", mine, " ranks; those who came before say ",
                theirs));
  }
  store_.set(generation_of(rank()), std::to_string(generation()), deadline);
  group_ = group(store_.add(text(generation_, "groups of rank ", rank()), 1, deadline));
}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine, Deadline deadline) {
  const auto prefix = text(group_, "round ", round_++, "/rank ");
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(text(prefix, r));
  store_.set(keys[static_cast<std::size_t>(rank())], mine, deadline);
  try {
    return store_.get(keys, deadline);
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded("making a group", error.waited_for(), error.ranks(),
                           members_of_other_generations(error.ranks()));
  }
}

std::string StoreBootstrap::group(std::int64_t number) const { return text(generation_, "group ", number, "/"); }

void StoreBootstrap::give_up(const std::string& reason) const {
  store_.fail_waiters(group_, text("rank ", rank(), ": ", reason), for_last_words());
}

// Ranks that wait for the first group get the error. Ranks that already have that group go on.
void StoreBootstrap::refuse(const std::string& reason) const {
  store_.fail_waiters(group(1), reason, for_last_words());
  throw ClusterError(reason);
}

std::string StoreBootstrap::members_of_other_generations(const std::vector<int>& ranks) const {
  std::string members;
  for (const int rank : ranks) {
    const auto theirs = store_.compare_set(generation_of(rank), "", "", for_last_words());
    if (theirs.empty() || theirs == std::to_string(generation())) continue;
    members += text("; rank ", rank, " is of generation ", theirs, ", this rank of ", generation());
  }
  return members;
}

}  // namespace lockstep::cluster
