#include "elastic/newcomers.h"

#include <chrono>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr std::chrono::seconds kForAnswer(5), kBetweenSlowLooks(1);
constexpr std::chrono::milliseconds kBetweenFastLooks(200);

constexpr const char* kCount = "newcomers";
std::string key_of(std::int64_t number) { return text("newcomer ", number); }
std::string key_of_end(std::int64_t training) { return text("end of training ", training); }

// What must be the same for all members.
std::string lines(std::int64_t training, const std::string& description) {
  return text("training number ", training, "\n", description);
}

Deadline soon() { return Deadline::after(kForAnswer); }

}  // namespace

Candidate::Candidate(const Store& store, const World& self, std::int64_t training, const std::string& description)
    : store_(store),
      self_(self),
      training_(training),
      number_(store_.add(kCount, 1, soon())),
      presence_(show_presence(store_, Newcomer{number_, self.host}.name())) {
  store_.set(key_of(number_), text(self_.host, "\n", lines(training, description)), soon());
}

Members Candidate::wait(Deadline deadline, const std::function<void()>& look) {
  StoreRegistry registry(store_);
  while (true) {
    try {
      const auto next = Deadline::after(kBetweenSlowLooks);
      return invitation(self_, registry, number_, next.time() < deadline.time() ? next : deadline);
    } catch (const DeadlineExceeded&) {
      if (deadline.passed()) throw DeadlineExceeded("waiting to be taken into the job", deadline.waited());
    }
    look();
    if (!store_.compare_set(key_of_end(training_), "", "", soon()).empty()) {
      throw ClusterError("the training ended before this process could join it");
    }
  }
}

Watch::Watch(const Store& store, std::int64_t training, const std::string& description)
    : store_(store),
      entry_(lines(training, description)),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

void Watch::watch(const std::stop_token& stop) {
  try {
    for (std::int64_t next = 1; !stop.stop_requested();) {
      try {
        add(next, store_.get(key_of(next), Deadline::after(kBetweenFastLooks)));
        ++next;
      } catch (const DeadlineExceeded&) {  // none has come
      }
      if (any()) waiting();
    }
  } catch (const Error&) {  // the store is gone
  }
}

void Watch::add(std::int64_t number, const std::string& entry) {
  StoreRegistry registry(store_);
  if (was_invited(registry, number, soon())) return;
  const auto end = entry.find('\n');
  const auto theirs = end == std::string::npos ? entry : entry.substr(end + 1);
  if (theirs != entry_) {
    const auto [ours, other] = first_difference(entry_, theirs);
    const auto why = text("this process cannot join the job, which has ", ours, "; it has ", other);
    refuse(registry, number, why, soon());
    return log_warning(text("a newcomer was refused: ", why));
  }
  MutexLock lock(mutex_);
  seen_.push_back({number, entry.substr(0, end)});
  any_ = true;
}

std::vector<Newcomer> Watch::waiting() {
  StoreRegistry registry(store_);
  MutexLock lock(mutex_);
  std::erase_if(seen_, [&](const Newcomer& newcomer) {
    return was_invited(registry, newcomer.number, soon()) || has_gone(newcomer.name(), registry, soon());
  });
  any_ = !seen_.empty();
  return seen_;
}

void Watch::tell_end(const Store& store, std::int64_t training) {
  try {
    store.set(key_of_end(training), "reached", soon());
  } catch (const Error&) {  // the store is gone: newcomers find that out
  }
}

}  // namespace lockstep::elastic
