#include "elastic/newcomers.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>

#include "base/log.h"
#include "base/text.h"
#include "cluster/rendezvous.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr std::chrono::seconds kForAnswer(5), kBetweenSlowPolls(1);
constexpr std::chrono::milliseconds kBetweenFastPolls(200);

std::string key_of(std::int64_t place) { return text("newcomer ", place); }

std::string new_name() {
  std::random_device random;
  return text("newcomer-", std::hex, random(), random());
}

struct Entry {
  Newcomer newcomer;
  std::string lines;
};
Entry entry_in(const std::string& printed) {
  const auto name = printed.find('\n'), host = printed.find('\n', name + 1);
  if (host == std::string::npos) throw InvalidArgument("an entry of a newcomer that cannot be read (another version?)");
  return {{printed.substr(0, name), printed.substr(name + 1, host - name - 1)}, printed.substr(host + 1)};
}
std::string key_of_end_of(std::int64_t training) { return text("end of training ", training); }

// What must be the same for all members.
std::string lines(std::int64_t training, const std::string& description) {
  return text("fit number ", training, " of its program (from 0 on)\n", description);
}

Deadline soon() { return Deadline::after(kForAnswer); }

}  // namespace

Candidate::Candidate(const Store& store, const World& self, int first_size, std::int64_t training,
                     const std::string& description)
    : store_(store),
      self_(self),
      first_size_(first_size),
      training_(training),
      name_(new_name()),
      presence_(show_presence(store_, name_)) {
  const auto entry = text(name_, "\n", self_.host, "\n", lines(training, description));
  for (std::int64_t place = 0; store_.compare_set(key_of(place), "", entry, soon()) != entry;) ++place;
}

Members Candidate::wait(Deadline deadline, const std::function<void()>& poll) {
  StoreRegistry registry(store_);
  while (true) {
    try {
      const auto next = Deadline::after(kBetweenSlowPolls);
      return invitation(self_, registry, name_, next.time() < deadline.time() ? next : deadline);
    } catch (const DeadlineExceeded&) {
      if (deadline.passed()) throw DeadlineExceeded("waiting to be taken into the job", deadline.waited());
    }
    poll();
    require_members();
    if (!store_.compare_set(key_of_end_of(training_), "", "", soon()).empty()) {
      throw ClusterError("the training ended before this process could join it");
    }
  }
}

// A process that is left alone would wait for nobody.
void Candidate::require_members() const {
  StoreRegistry registry(store_);
  for (int rank = 0; rank < first_size_; ++rank) {
    if (!has_gone(name_of_process(rank), registry, soon())) return;
  }
  for (std::int64_t place = 0;; ++place) {
    const auto entry = store_.compare_set(key_of(place), "", "", soon());
    if (entry.empty()) throw ClusterError("all workers of the job that this process was to join have ended");
    const auto name = entry_in(entry).newcomer.name;
    if (was_invited(registry, name, soon()) && !has_gone(name, registry, soon())) return;
  }
}

Watch::Watch(const Store& store, std::int64_t training, const std::string& description)
    : store_(store),
      entry_(lines(training, description)),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

// It asks now and then: a call that waits at the store made the steps of two workers on two cores 7% slower.
void Watch::watch(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  for (std::int64_t next = 0;
       !stopped.wait_for(lock, stop, kBetweenFastPolls, [&] { return stop.stop_requested(); });) {
    try {
      const auto entry = store_.compare_set(key_of(next), "", "", soon());
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
    if (any()) forget_invited();
  }
}

// Again after an exception.
void Watch::add(const std::string& printed) {
  const auto [newcomer, theirs] = entry_in(printed);
  StoreRegistry registry(store_);
  if (was_invited(registry, newcomer.name, soon())) return;
  if (theirs != entry_) {
    const auto [ours, other] = first_difference(entry_, theirs);
    const auto why = text("this process cannot join the job, which has ", ours, "; it has ", other);
    refuse(registry, newcomer.name, why, soon());
    return log_warning(text("a newcomer was refused: ", why));
  }
  MutexLock lock(mutex_);
  seen_.push_back(newcomer);
  any_ = true;
}

std::vector<Newcomer> Watch::waiting() {
  StoreRegistry registry(store_);
  MutexLock lock(mutex_);
  std::erase_if(seen_, [&](const Newcomer& newcomer) {
    return was_invited(registry, newcomer.name, soon()) || has_gone(newcomer.name, registry, soon());
  });
  any_ = !seen_.empty();
  return seen_;
}

void Watch::forget_invited() {
  try {
    waiting();
  } catch (const Error&) {  // later then
  }
}

void Watch::tell_end(const Store& store, std::int64_t training, const Members& members) {
  try {
    store.without_prefix().set(cluster::kMembersAtEnd, join(members.names, "\n") + "\n", soon());
    store.set(key_of_end_of(training), "reached", soon());
  } catch (const Error&) {  // the store is gone: newcomers find that out
  }
}

}  // namespace lockstep::elastic
