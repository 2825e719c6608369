#include "elastic/registry.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr int kMostBallots = 500, kMostDoublings = 5;
constexpr double kShortestPause = 0.01;  // seconds, at the most

std::string key_of_votes(const std::string& key) { return "votes on " + key; }

std::vector<std::string> stores_of(const Members& members) {
  std::vector<std::string> stores;
  for (const auto& process : members.processes) add_store(stores, process.store);
  return stores;
}

}  // namespace

struct Registry::Ballot {
  int round = 0;  // 0: none
  std::string proposer = "nobody";
  auto operator<=>(const Ballot&) const = default;
};

// An acceptor's state, but for the ballot that it has promised.
struct Registry::Accepted {
  Ballot ballot;
  std::string value;
};

struct Registry::Vote {
  bool given = false;
  int round = 0;  // the round of the highest ballot that it knows
  Accepted accepted;
};

Registry::Registry(std::shared_ptr<cluster::Stores> stores, const Members& members)
    : stores_(std::move(stores)),
      name_(members.self().name),
      here_(members.self().store),
      acceptors_(stores_of(members)) {}

// Returns true where the votes decide: all weigh the same, but the first decides where the others are even.
bool Registry::decides(const std::vector<bool>& votes) const {
  const auto weight = 2 * std::count(votes.begin(), votes.end(), true) + (votes[0] ? 1 : 0);
  return 2 * weight > 2 * static_cast<std::ptrdiff_t>(votes.size()) + 1;
}

// Makes the acceptor promise to accept no lower ballot; with a value, also makes it accept that value.
Registry::Vote Registry::change(const std::string& store, const std::string& key, const Ballot& ballot,
                                const std::string* value) {
  for (std::string seen;;) {
    Ballot promised;
    Accepted accepted;
    std::istringstream in(seen);
    in >> promised.round >> promised.proposer >> accepted.ballot.round >> accepted.ballot.proposer;
    if (const auto end = seen.find('\n'); end != std::string::npos) accepted.value = seen.substr(end + 1);
    if (promised > ballot) return {.given = false, .round = promised.round, .accepted = accepted};
    const auto next = value != nullptr ? Accepted{ballot, *value} : accepted;
    const auto state =
        text(ballot.round, " ", ballot.proposer, " ", next.ballot.round, " ", next.ballot.proposer, "\n", next.value);
    const auto kept = stores_->compare_set(store, key_of_votes(key), seen, state);
    if (kept == state) return {.given = true, .round = ballot.round, .accepted = accepted};
    seen = kept;
  }
}

struct Registry::Outcome {
  std::string decided;       // empty: nothing was
  int seen = 0;              // the highest round of a ballot
  bool most_answer = false;  // so many that they could have decided
  std::string silent;        // the stores that did not answer
};

// Proposes the value in a ballot with a number that this process has not used before.
Registry::Outcome Registry::propose(const std::string& key, const std::string& value, int seen) {
  const Ballot ballot{stores_->next_round(seen), name_};
  Outcome outcome{.decided = {}, .seen = seen, .most_answer = false, .silent = {}};
  Accepted last;
  last.value = value;
  const auto ask_all = [&](const std::string* accept) {
    std::vector<std::optional<Vote>> votes(acceptors_.size());
    stores_->for_each(acceptors_.size(), [&](std::size_t i) {
      try {
        votes[i] = change(acceptors_[i], key, ballot, accept);
      } catch (const Error&) {
      }
    });
    std::vector<bool> answered(acceptors_.size()), given(acceptors_.size());
    outcome.silent.clear();
    for (std::size_t i = 0; i < acceptors_.size(); ++i) {
      answered[i] = votes[i].has_value();
      given[i] = answered[i] && votes[i]->given;
      if (!answered[i]) {
        outcome.silent += text(outcome.silent.empty() ? "" : ", ", acceptors_[i]);
        continue;
      }
      outcome.seen = std::max(outcome.seen, votes[i]->round);
      if (accept == nullptr && votes[i]->accepted.ballot > last.ballot) last = votes[i]->accepted;
    }
    outcome.most_answer = decides(answered);
    return decides(given);
  };
  if (!ask_all(nullptr) || !ask_all(&last.value)) return outcome;
  stores_->for_each(acceptors_.size(), [&](std::size_t i) { tell(acceptors_[i], key, last.value); });
  outcome.decided = last.value;
  return outcome;
}

// Pauses between ballots: members that propose at the same time may keep each other from a decision.
std::string Registry::enter(const std::string& key, const std::string& value, Deadline deadline) {
  if (acceptors_.size() == 1) return stores_->compare_set(acceptors_[0], key, "", value);
  int seen = 0;
  for (int ballots = 0; ballots < kMostBallots; ++ballots) {
    if (auto told = read_here(key); !told.empty()) return told;
    const auto outcome = propose(key, value, seen);
    if (!outcome.decided.empty()) return outcome.decided;
    if (!outcome.most_answer && passed(deadline)) {
      throw ClusterError(text("this process cannot reach most of the job's ", acceptors_.size(),
                              " hosts, so that it must not go on: no answer from the store(s) at ", outcome.silent));
    }
    seen = outcome.seen;
    stores_->pause(kShortestPause * (1 << std::min(ballots, kMostDoublings)));
  }
  throw ClusterError(text("the members of this job cannot agree: ", kMostBallots, " ballots of this one failed"));
}

std::vector<std::string> Registry::get(const std::vector<std::string>& keys, Deadline deadline) {
  auto found = stores_->get(here_, keys, deadline);
  std::vector<int> missing;
  std::vector<std::string> values;
  const auto seen_here = found;
  Mutex mutex;
  stores_->for_each(acceptors_.size(), [&](std::size_t other) {
    if (acceptors_[other] == here_) return;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      auto value = seen_here[i] ? std::string() : read_at(acceptors_[other], keys[i]);
      MutexLock lock(mutex);
      if (!value.empty()) found[i] = std::move(value);
    }
  });
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!found[i]) missing.push_back(static_cast<int>(i));
    values.push_back(found[i].value_or(""));
  }
  if (!missing.empty()) throw DeadlineExceeded("reading who is a member", deadline.waited(), missing);
  return values;
}

std::string Registry::read_here(const std::string& key) { return stores_->compare_set(here_, key, "", ""); }

std::string Registry::read_at(const std::string& store, const std::string& key) {
  try {
    return stores_->compare_set(store, key, "", "");
  } catch (const Error&) {
    return {};
  }
}

void Registry::tell(const std::string& store, const std::string& key, const std::string& value) {
  try {
    stores_->compare_set(store, key, "", value);
  } catch (const Error&) {
  }
}

}  // namespace lockstep::elastic
