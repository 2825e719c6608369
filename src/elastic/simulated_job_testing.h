// For tests: a job whose processes are fibers, on hosts with stores (elastic/simulation_testing.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "cluster/liveness.h"
#include "elastic/members.h"
#include "elastic/next_generation.h"
#include "elastic/simulation_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic::simulated {

inline constexpr double kBetweenLooks = 0.1, kToAnswer = 0.5;  // seconds of virtual time

// Hosts with stores that answer after some time, and the collective operations of their processes.
struct Job {
  explicit Job(unsigned seed) : time(seed) {}

  struct Operation {
    std::string kind;
    std::map<int, std::string> arrived;  // [rank]
  };

  Simulation time;
  int row_size = 1;                                              // processes that have a copy of the model together
  std::vector<std::map<std::string, std::string>> entries;       // [host]
  std::vector<int> host_of;                                      // [process]
  std::set<int> cut_off;                                         // hosts that are cut off from the others
  double cut_from = INFINITY, cut_until = INFINITY;              // in this time
  std::map<int, std::string> name_of;                            // [process]
  std::map<std::pair<std::int64_t, int>, int> process_of;        // [generation, rank]
  std::map<int, std::int64_t> generation_of;                     // [process] whose group it has
  std::map<std::pair<std::int64_t, int>, Operation> operations;  // [generation, number]
  std::vector<Process> newcomers;                                // those that have come
  double near_end = INFINITY;                                    // when the first member began the last epoch
  double broken_links = 0;                                       // the probability in an operation
  std::string problem;                                           // the first that was found
  std::vector<std::vector<std::string>> histories;               // those of processes that trained to the end
  std::set<int> trained;                                         // processes that trained to the end
  double ended = 0;
  bool has_long_waits = false;  // long waits are to be expected

  static std::string store_of(int host) { return text("host-", host); }
  static Process process_at(const std::string& name, int host) { return {name, store_of(host), store_of(host)}; }
  int host() const { return host_of[static_cast<std::size_t>(time.self())]; }
  std::map<std::string, std::string>& entries_of(int host) { return entries[static_cast<std::size_t>(host)]; }

  // Returns for how long two hosts have not reached each other; negative where they do.
  double cut_since(int one, int other) const {
    const bool apart = cut_off.contains(one) != cut_off.contains(other);
    return apart && time.now() < cut_until ? time.now() - cut_from : -1;
  }

  // Returns true where most hosts with members are not cut off: rank 0's host counts for a little more than one.
  bool is_majority(const std::vector<std::string>& stores) const {
    double here = 0, all = 0;
    for (const auto& store : std::set(stores.begin(), stores.end())) {
      const double weight = store == stores[0] ? 1.5 : 1;
      all += weight;
      if (!cut_off.contains(std::stoi(store.substr(5)))) here += weight;
    }
    return here > all / 2;
  }

  std::vector<Process> waiting() {
    auto all = newcomers;
    std::erase_if(all, [&](const auto& one) {
      return entries_of(host()).contains(key_of_invitation(one.name)) ||
             entries_of(std::stoi(one.store.substr(5))).contains(cluster::key_of_end(one.name));
    });
    return whole_rows(all, row_size);
  }

  // Writes the entry that a process leaves in its host's store when it has ended.
  void tell_ends() {
    for (const auto& [process, name] : name_of) {
      if (!time.is_alive(process))
        entries_of(host_of[static_cast<std::size_t>(process)]).try_emplace(cluster::key_of_end(name), "reached");
    }
  }

  void expect(bool holds, const std::string& otherwise) {
    if (!holds && problem.empty()) problem = otherwise;
  }
};

class SimulatedStores final : public cluster::Stores {
 public:
  explicit SimulatedStores(Job& job) : job_(job) {}

  std::string compare_set(const std::string& store, const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    auto& entries = reach(store);
    const auto found = entries.find(key);
    const auto before = found == entries.end() ? "" : found->second;
    const bool sets = before == expected && !desired.empty();
    if (sets) entries[key] = desired;
    job_.time.notify();
    reach(store);  // the answer
    return sets ? desired : before;
  }

  std::vector<std::optional<std::string>> get(const std::string& store, const std::vector<std::string>& keys,
                                              Deadline) override {
    auto& entries = reach(store);
    const auto holds = [&](const std::string& key) { return entries.contains(key); };
    job_.time.wait([&] { return std::all_of(keys.begin(), keys.end(), holds); }, job_.time.now() + kBetweenLooks);
    std::vector<std::optional<std::string>> values(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (holds(keys[i])) values[i] = entries.at(keys[i]);
    }
    return values;
  }

  double now() const override { return job_.time.now(); }
  bool passed(Deadline) const override { return job_.time.now() >= until; }
  void pause(double longest_seconds) override { job_.time.sleep(job_.time.random(0, longest_seconds)); }

  double until = 0;  // of the call that runs

 private:
  std::map<std::string, std::string>& reach(const std::string& store) {
    job_.time.pass_some_time();
    job_.tell_ends();
    const int host = std::stoi(store.substr(5));
    if (job_.cut_since(job_.host(), host) >= 0) {
      job_.time.sleep(kToAnswer);
      throw ClusterError(text("the store of ", store, " does not answer"));
    }
    return job_.entries_of(host);
  }

  Job& job_;
};

}  // namespace lockstep::elastic::simulated
