#include "elastic/failures.h"

#include <algorithm>

#include "base/text.h"
#include "cluster/strings.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

std::string key_of_failures(std::int64_t section) { return text("failures in section ", section); }

// Returns the list that is packed in the entry: the name of each member that failed, and after each name the reason.
std::vector<std::string> failures_in(const std::string& entry) {
  return cluster::unpack(entry).value_or(std::vector<std::string>());
}

void append(cluster::Stores& stores, const std::string& store, const std::string& key, const std::string& name,
            const std::string& reason) {
  for (std::string before;;) {
    auto failures = failures_in(before);
    if (std::find(failures.begin(), failures.end(), name) != failures.end()) return;
    failures.insert(failures.end(), {name, reason});
    const auto after = cluster::pack(failures);
    const auto kept = stores.compare_set(store, key, before, after);
    if (kept == after) return;
    before = kept;
  }
}

template <class... Kinds>
bool is_one_of(const std::exception& error) {
  return ((dynamic_cast<const Kinds*>(&error) != nullptr) || ...);
}

}  // namespace

bool is_of_program(const std::exception& error) {
  return !is_one_of<PeerLost, Aborted, DeadlineExceeded, ClusterError, Interrupted>(error);
}

std::string describe(const std::exception& error, const Members& members) {
  std::vector<int> ranks;
  if (const auto* const lost = dynamic_cast<const PeerLost*>(&error)) {
    if (lost->generation() == members.world.generation) ranks.push_back(lost->rank());
  } else if (const auto* const late = dynamic_cast<const DeadlineExceeded*>(&error)) {
    ranks = late->ranks();
  }
  return error.what() + launchers_ranks(members, ranks);
}

void tell_failure(cluster::Stores& stores, const Members& members, std::int64_t section, const std::exception& error) {
  const int rank = members.world.rank;
  const auto reason =
      text("worker ", rank, launchers_ranks(members, {rank}), " on ", members.world.host, ": ", error.what());
  std::vector<std::string> places;
  for (const auto& process : members.processes) add_store(places, process.store);
  stores.for_each(places.size(), [&](std::size_t i) {
    try {
      append(stores, places[i], key_of_failures(section), members.self().name, reason);
    } catch (const Error&) {  // that host is lost
    }
  });
}

void require_fewer_than_two_failures(Registry& registry, std::int64_t section) {
  std::vector<std::string> failures;
  try {
    failures = failures_in(registry.read_here(key_of_failures(section)));
  } catch (const Error&) {  // the store does not answer: then it is a loss
  }
  std::vector<std::string> reasons;
  for (std::size_t i = 1; i < failures.size(); i += 2) reasons.push_back(failures[i]);
  if (reasons.size() < 2) return;
  throw Error(text("the program failed on ", reasons.size(),
                   " workers in the same step, so that the others end too: ", join(reasons, "; ")));
}

}  // namespace lockstep::elastic
