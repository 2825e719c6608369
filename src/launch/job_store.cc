#include "launch/job_store.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "base/text.h"
#include "cluster/rendezvous.h"
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
  context.has_begun = [store] { return !entry(store, cluster::kJobHasBegun).empty(); };
  context.was_left_out = [store](int rank) {
    const auto members = entry(store, cluster::kMembersAtEnd);
    return !members.empty() && ("\n" + members).find(text("\nprocess-", rank, "\n")) == std::string::npos;
  };
}

std::vector<std::string> stores_of_members(const Store& store) {
  std::istringstream lines(entry(store, cluster::kStoresOfMembers));
  std::vector<std::string> stores;
  std::string line;
  std::getline(lines, line);  // the generation
  while (std::getline(lines, line)) stores.push_back(line);
  return stores;
}

void hold_store(const Store& store, ControlProtocol& control, const Signals& signals) {
  using Kind = ControlProtocol::Message::Kind;
  std::optional<Deadline> limit;
  while (!(limit && limit->passed()) && signals.next() == 0) {
    if (!control.silent_for(kShortSilenceSeconds)) {
      limit.reset();
    } else if (!limit) {
      limit = Deadline::after(kToHold);
    }
    const auto needed = stores_of_members(store);
    if (std::find(needed.begin(), needed.end(), store.address()) == needed.end()) return;
    for (auto message = control.next(); message.kind != Kind::none; message = control.next()) {
      if (message.kind == Kind::end || message.kind == Kind::signal) return;
    }
    pollfd polls[] = {{signals.descriptor(), POLLIN, 0}, {control.descriptor(), POLLIN, 0}};
    poll(polls, 2, kBetweenLooksMs);
  }
}

}  // namespace lockstep::launch
