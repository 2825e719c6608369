#include "cluster/launch/job_store.h"

#include <algorithm>
#include <sstream>

#include "base/text.h"
#include "cluster/liveness.h"
#include "cluster/rendezvous.h"
#include "cluster/store_backend.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

// False where the store does not answer.
template <class Call>
bool succeeds(const Call& call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string entry(const Store& store, const std::string& key) {
  std::string value;
  succeeds([&] { value = store.compare_set(key, "", "", Deadline::after(kForStore)); });
  return value;
}

bool has_ended(const Store& store, const std::string& name) { return !entry(store, cluster::key_of_end(name)).empty(); }

void JobStore::rank_will_not_come(int rank) const {
  succeeds([&] {
    job().fail_waiters("generation 0/", text("rank ", rank, " has ended, and others wait for it"),
                       Deadline::after(kForStore), text("/rank ", rank));
  });
}

void JobStore::process_has_ended(int process) const {
  succeeds([&] {
    if (here_) here_->backend().notice_end(process, Deadline::after(kForStore));
  });
}

bool JobStore::first_launcher_lives() const {
  if (cluster::is_etcd(address_)) return !has_ended(*here_, kLauncher);
  return succeeds([this] { job(); });
}

bool JobStore::has_begun() {
  const auto ask = [this] {
    has_begun_ = has_begun_ || !here_->compare_set(cluster::kJobHasBegun, "", "", Deadline::after(kForStore)).empty();
  };
  return succeeds(ask) ? has_begun_ : has_begun_ || cluster::is_etcd(here_->address());
}

bool JobStore::is_member(int rank, const std::string& joined_at_restart) const {
  const auto members = entry(*here_, cluster::kMembersNow);
  const auto name = joined_at_restart.empty() ? text(cluster::kProcess, rank, " ")
                                              : text(cluster::kNewcomer, rank, "-", joined_at_restart, "-");
  return members.empty() || members.find("\n" + name) != std::string::npos;
}

std::string JobStore::refusal(int rank, const std::string& restart) const {
  return entry(*here_, cluster::key_of_refusal(std::to_string(rank), restart));
}

bool JobStore::was_left_out(int rank) const {
  const auto members = entry(*here_, cluster::kMembersAtEnd);
  return !members.empty() && ("\n" + members).find(text("\n", cluster::kProcess, rank, "\n")) == std::string::npos;
}

std::vector<MemberPlace> places_of_members(const Store& store) {
  return parse_places(entry(store, cluster::kMembersNow));
}

std::vector<MemberPlace> parse_places(const std::string& printed) {
  std::istringstream lines(printed);
  std::vector<MemberPlace> places;
  std::string line, name;
  std::getline(lines, line);  // the generation
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    MemberPlace place;
    int part = 0;
    words >> name >> place.store >> part >> std::ws;
    const auto rank = name.substr(std::min(name.size(), name.find('-') + 1));  // process-RANK, newcomer-RANK-...
    place.rank = whole_number<int>(rank.substr(0, rank.find('-'))).value_or(-1);
    std::getline(words, place.host);
    places.push_back(std::move(place));
  }
  return places;
}

}  // namespace lockstep::launch
