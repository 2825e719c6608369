#include "elastic/newcomers.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <sstream>

#include "base/log.h"
#include "base/text.h"
#include "cluster/rendezvous.h"
#include "elastic/members.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

using Sign = cluster::Liveness::Sign;

// The store of a process's own host gets longer: its launcher may be slow, and must learn whom it may not end.
constexpr std::chrono::seconds kForAnswer(1), kForOwnAnswer(5), kBetweenSlowPolls(1);
constexpr std::chrono::milliseconds kBetweenFastPolls(200);
constexpr int kMostUnansweredPolls = 5;
constexpr const char* kMembers = "members";
constexpr const char* kNoJob = "the host of this process does not know of a job that it could join";

std::string key_of(std::int64_t place) { return text("newcomer ", place); }

// One of the numbers by which a launcher knows this process; empty where it has no launcher.
std::string launchers_number(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && whole_number<int>(value) ? value : "";
}
std::string launchers_rank() { return launchers_number("LOCKSTEP_RANK"); }
std::string launchers_restart() { return launchers_number("LOCKSTEP_RESTART"); }

std::string new_name() {
  std::random_device random;
  return text(name_of_newcomer(launchers_rank(), launchers_restart()), std::hex, random(), random());
}

std::string key_of_end_of(std::int64_t training) { return text("end of training ", training); }

// Replaces an entry of this generation or an earlier one. An entry begins with its generation.
void replace_earlier(const Store& store, const char* key, const std::string& entry, std::chrono::seconds for_answer) {
  const auto generation_of = [](const std::string& text) {
    std::int64_t first = 0;
    std::istringstream(text) >> first;
    return first;
  };
  auto before = store.compare_set(key, "", entry, Deadline::after(for_answer));
  while (before != entry && generation_of(before) <= generation_of(entry)) {
    before = store.compare_set(key, before, entry, Deadline::after(for_answer));
  }
}

// Returns the latest members that a host of the job has an entry of.
std::optional<Members> latest_members(cluster::ConnectedStores& job, const World& self) {
  const auto read = [&](const std::string& store) -> std::optional<Members> {
    try {
      const auto printed = job.compare_set(store, kMembers, "", "");
      if (!printed.empty()) return parse_members(printed, self);
    } catch (const Error&) {
    }
    return std::nullopt;
  };
  auto latest = read(job.here().address());
  std::vector<std::string> stores;
  if (latest) {
    stores = latest->stores;
  } else {  // this process's host has just come to the job
    const auto& here = job.here();
    const auto deadline = Deadline::after(kForOwnAnswer);
    std::istringstream lines(here.without_prefix().compare_set(cluster::kKnownStores, "", "", deadline));
    for (std::string line; std::getline(lines, line);) stores.push_back(line);
  }
  for (const auto& store : stores) {
    auto other = read(store);
    if (other && (!latest || other->world.generation > latest->world.generation)) latest = std::move(other);
  }
  return latest;
}

// A newcomer that has claimed a part has a line in this entry.
constexpr const char* kClaims = "parts of newcomers";

int part_of_fewest(const std::vector<Process>& claims, int row_size) {
  std::vector<int> counts(static_cast<std::size_t>(row_size));
  for (const auto& claim : claims) {
    if (claim.part < row_size) ++counts[static_cast<std::size_t>(claim.part)];
  }
  return static_cast<int>(std::min_element(counts.begin(), counts.end()) - counts.begin());
}

}  // namespace

ClaimedPart::ClaimedPart(const std::shared_ptr<cluster::ConnectedStores>& stores, const World& self, int row_size)
    : name_(new_name()), presence_(cluster::show_presence(stores->here(), name_)) {
  const auto members = latest_members(*stores, self);
  if (!members) throw ClusterError(kNoJob);
  const auto& store = members->processes[0].store;
  cluster::Liveness liveness(stores);
  for (auto before = stores->compare_set(store, kClaims, "", "");;) {
    auto claims = parse_processes(before);
    std::erase_if(claims, [&](const Process& claim) { return liveness.look(claim.store, claim.name) != Sign::lives; });
    part_ = part_of_fewest(claims, row_size);
    claims.push_back({name_, self.host, stores->here().address(), part_});
    const auto after = print(claims), kept = stores->compare_set(store, kClaims, before, after);
    if (kept == after) return;
    before = kept;
  }
}

void publish(const Members& members, cluster::ConnectedStores& stores) {
  const auto printed = print(members);
  const auto for_launchers = text(members.world.generation, "\n", print(members.processes));
  stores.for_each(members.stores.size(), [&](std::size_t i) {
    const auto& address = members.stores[i];
    const auto is_there = [&](const Process& process) { return process.store == address; };
    const bool has_members = std::any_of(members.processes.begin(), members.processes.end(), is_there);
    const bool is_own = address == members.self().store;
    if (has_members ? !is_own : members.world.rank != 0) return;
    const auto for_answer = is_own ? kForOwnAnswer : kForAnswer;
    try {
      const auto store = stores.at(address);
      replace_earlier(store, kMembers, printed, for_answer);
      replace_earlier(store.without_prefix(), cluster::kMembersNow, for_launchers, for_answer);
    } catch (const Error&) {  // that host is lost
    }
  });
}

Candidate::Candidate(std::shared_ptr<cluster::ConnectedStores> stores, const World& self, std::int64_t training,
                     const std::string& description, int part)
    : stores_(std::move(stores)),
      self_(self),
      training_(training),
      process_{.name = new_name(), .host = self.host, .store = stores_->here().address(), .part = part},
      entry_(text(print(process_), "\n", training, "\n", description)),
      presence_(cluster::show_presence(stores_->here(), process_.name)),
      liveness_(stores_) {
  const auto found = latest_members(*stores_, self_);
  if (!found) throw ClusterError(kNoJob);
  enter(found->stores);
}

// Enters this process in the stores where it is not entered yet: hosts come, and answer again.
void Candidate::enter(const std::vector<std::string>& stores) {
  for (const auto& store : stores) {
    if (entered_.contains(store)) continue;
    try {
      for (std::int64_t place = 0; stores_->compare_set(store, key_of(place), "", entry_) != entry_;) ++place;
      entered_.insert(store);
    } catch (const Error&) {  // that host is lost
    }
  }
}

// Tells the launcher why, so that the launcher does not start this process again.
void Candidate::tell_refusal(const char* why) const {
  const auto key = cluster::key_of_refusal(launchers_rank(), launchers_restart());
  stores_->here().without_prefix().set(key, why, Deadline::after(kForOwnAnswer));
}

Members Candidate::take(const std::string& invitation) const {
  try {
    return place_in(invitation, self_);
  } catch (const ClusterError&) {
    tell_refusal(cluster::kDoesNotFit);
    throw;
  }
}

std::optional<Members> Candidate::wait(Deadline deadline, const std::function<void()>& poll) {
  const auto key = key_of_invitation(process_.name);
  while (true) {
    const auto next = Deadline::after(kBetweenSlowPolls);
    const auto invitation = stores_->get(process_.store, {key}, next.time() < deadline.time() ? next : deadline)[0];
    if (invitation) return take(*invitation);
    if (deadline.passed()) throw DeadlineExceeded("waiting to be taken into the job", deadline.waited());
    poll();
    if (training_has_ended()) return std::nullopt;
  }
}

// Throws where all members have ended: a process that is alone would wait for nobody.
bool Candidate::training_has_ended() {
  const auto latest = latest_members(*stores_, self_);
  unanswered_ = latest ? 0 : unanswered_ + 1;
  if (unanswered_ > kMostUnansweredPolls)
    throw ClusterError("no host of the job that this process was to join answers");
  if (!latest) return false;
  enter(latest->stores);
  auto stores = latest->stores;
  stores.push_back(process_.store);
  for (const auto& store : stores) {
    try {
      if (stores_->compare_set(store, key_of_end_of(training_), "", "").empty()) continue;
    } catch (const Error&) {  // that host is lost
      continue;
    }
    return true;
  }
  for (const auto& process : latest->processes) {
    if (liveness_.look(process.store, process.name) == Sign::lives) return false;
  }
  tell_refusal(cluster::kNobodyIsLeft);
  throw ClusterError("all workers of the job that this process was to join have ended");
}

Watch::Watch(std::shared_ptr<Registry> registry, std::int64_t training, const std::string& description, int row_size)
    : registry_(std::move(registry)),
      liveness_(registry_->stores()),
      training_(training),
      description_(description),
      row_size_(row_size),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

// Asks now and then: a call that waits at the store made the steps of two workers on two cores 7% slower.
void Watch::watch(const std::stop_token& stop) {
  for (std::int64_t next = 0; !stop_requested_by(Deadline::after(kBetweenFastPolls), stop);) {
    try {
      const auto entry = registry_->read_here(key_of(next));
      if (!entry.empty()) {
        add(entry);
        ++next;
      }
    } catch (const DeadlineExceeded&) {  // the store is slow
    } catch (const InvalidArgument& error) {
      log_warning(error.what());
      ++next;
    } catch (const Error&) {  // the store is gone
      return;
    }
    forget_invited();
  }
}

// Adds the newcomer of an entry, of which the first two lines are the process and the training. Called with the same
// entry again after an exception.
void Watch::add(const std::string& entry) {
  std::istringstream in(entry);
  std::string process, number;
  std::getline(in, process);
  std::getline(in, number);
  const auto training = whole_number(number);
  if (!training) throw InvalidArgument("an entry of a newcomer that cannot be read (another version?)");
  const auto newcomer = parse_process(process);
  const auto description = entry.substr(process.size() + number.size() + 2);
  // A newcomer to an earlier training will find its end; one to a later training has found the end of this one.
  if (training != training_ || was_answered(newcomer)) return;
  if (description != description_) {
    const auto [ours, theirs] = first_difference(description_, description);
    const auto why = text("this process cannot join the job, which has ", ours, "; it has ", theirs);
    refuse(*registry_, newcomer, why);
    return log_warning(text("a newcomer was refused: ", why));
  }
  MutexLock lock(mutex_);
  seen_.push_back(newcomer);
}

bool Watch::was_answered(const Process& newcomer) const {
  return !registry_->read_here(key_of_invitation(newcomer.name)).empty();
}

std::vector<Process> Watch::waiting() {
  MutexLock lock(mutex_);
  std::vector<Process> wait, there;  // `there`: without those whose host is silent, perhaps for a while
  for (const auto& one : seen_) {
    const auto sign = was_answered(one) ? Sign::ended : liveness_.look(one.store, one.name);
    if (sign != Sign::ended) wait.push_back(one);
    if (!cluster::Liveness::is_loss(sign)) there.push_back(one);
  }
  seen_ = std::move(wait);
  there = whole_rows(there, row_size_);
  any_ = !there.empty();
  return there;
}

void Watch::forget_invited() {
  try {
    waiting();
  } catch (const Error&) {  // they are forgotten later
  }
}

void Watch::tell_end(cluster::ConnectedStores& stores, std::int64_t training, const Members& members) {
  std::string names;
  for (const auto& process : members.processes) names += process.name + "\n";
  for (const auto& address : members.stores) {
    try {
      const auto store = stores.at(address);
      store.without_prefix().set(cluster::kMembersAtEnd, names, Deadline::after(kForAnswer));
      store.set(key_of_end_of(training), "reached", Deadline::after(kForAnswer));
    } catch (const Error&) {  // that host is lost
    }
  }
}

}  // namespace lockstep::elastic
