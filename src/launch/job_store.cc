#include "launch/job_store.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "base/text.h"
#include "cluster/rendezvous.h"
#include "cluster/store_backend.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kToHold(30);  // where no other launcher says that the job has ended
constexpr int kBetweenLooksMs = 100;

}  // namespace

std::string entry(const Store& store, const std::string& key) {
  try {
    return store.compare_set(key, "", "", Deadline::after(kForStore));
  } catch (const Error&) {
    return {};
  }
}

void tell_that_it_ended(const std::function<Store()>& store, int rank) {
  try {
    store().fail_waiters("generation 0/", text("rank ", rank, " has ended, and others wait for it"),
                         Deadline::after(kForStore), text("/rank ", rank));
  } catch (const Error&) {
  }
}

void use_store(JobProcesses::Context& context, const Store& store) {
  context.process_ended = [store](int process) {
    try {
      store.backend().notice_end(process, Deadline::after(kForStore));
    } catch (const Error&) {  // the others learn it from the store, later
    }
  };
  const bool in_etcd = cluster::is_etcd(store.address());
  context.has_begun = [store, in_etcd, has_begun = false]() mutable {
    try {
      has_begun = has_begun || !store.compare_set(cluster::kJobHasBegun, "", "", Deadline::after(kForStore)).empty();
    } catch (const Error&) {
      if (in_etcd) return true;  // it elects a leader, or cannot be reached: a job that runs must not end for that
    }
    return has_begun;
  };
  context.refusal = [store](int rank, const std::string& restart) {
    return entry(store, cluster::key_of_refusal(std::to_string(rank), restart));
  };
  context.is_member = [store](int rank, const std::string& joined_at_restart) {
    const auto members = entry(store, cluster::kMembersNow);
    const auto name = joined_at_restart.empty() ? text(cluster::kProcess, rank, " ")
                                                : text(cluster::kNewcomer, rank, "-", joined_at_restart, "-");
    return members.empty() || members.find("\n" + name) != std::string::npos;
  };
  context.was_left_out = [store](int rank) {
    const auto members = entry(store, cluster::kMembersAtEnd);
    return !members.empty() && ("\n" + members).find(text("\n", cluster::kProcess, rank, "\n")) == std::string::npos;
  };
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

void hold_store(const Store& store, ControlProtocol& control, const Signals& signals) {
  using Kind = ControlProtocol::Message::Kind;
  auto limit = Deadline::after(kToHold);
  while (!limit.passed() && signals.next() == 0) {
    if (!control.silent_for(kShortSilenceSeconds)) limit = Deadline::after(kToHold);
    const auto members = places_of_members(store);
    const auto is_here = [&](const auto& place) { return place.store == store.address(); };
    if (std::none_of(members.begin(), members.end(), is_here)) return;
    for (auto message = control.next(); message.kind != Kind::none; message = control.next()) {
      if (message.kind == Kind::end || message.kind == Kind::signal) return;
    }
    pollfd polls[] = {{signals.descriptor(), POLLIN, 0}, {control.descriptor(), POLLIN, 0}};
    poll(polls, 2, kBetweenLooksMs);
  }
}

}  // namespace lockstep::launch
