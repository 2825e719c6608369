// Which of a job's processes are lost, as the stores of their hosts tell.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "cluster/stores.h"

namespace lockstep::cluster {

// Shows in a store that this process, which others know by `name`, lives: while the returned object does, and not
// longer than the process (Store::set_at_end). Then the store has the entry with the key `key_of_end(name)`.
std::shared_ptr<void> show_presence(const Store& store, const std::string& name);
std::string key_of_end(const std::string& name);

// Says who is lost, and why, of those that show their presence in stores. A process may show it in the store of its
// host alone: a host that is lost tells nothing, so its silence counts too. Any thread.
//
// A Group finds by itself which of its ranks are lost, while it waits for them: docs/design/elastic.md lists all ways.
class Liveness {
 public:
  enum class Sign {
    lives,
    silent,  // its store does not answer: the host may be stopped for a moment
    lost,    // its store has been silent for too long
    ended,
  };
  static bool is_loss(Sign sign) { return sign == Sign::lost || sign == Sign::ended; }

  // A store that has not answered for so many seconds, in so many looks in a row, is lost.
  struct Patience {
    double seconds = 2;
    int looks = 3;
  };
  explicit Liveness(std::shared_ptr<Stores> stores) : Liveness(std::move(stores), Patience()) {}
  Liveness(std::shared_ptr<Stores> stores, const Patience& patience)
      : stores_(std::move(stores)), patience_(patience) {}

  // Looks for a process, which has a `name`, in the `store` where it shows its presence.
  Sign look(const std::string& store, const std::string& name);

  // Looks for several, [i], at all stores at once.
  template <class Process>
  std::vector<Sign> look(const std::vector<Process>& processes);

 private:
  struct Silence {
    double since = 0;
    int looks = 0;
  };
  const std::shared_ptr<Stores> stores_;
  const Patience patience_;
  Mutex mutex_;
  std::map<std::string, Silence> silences_ LOCKSTEP_GUARDED_BY(mutex_);  // [store]
};

template <class Process>
std::vector<Liveness::Sign> Liveness::look(const std::vector<Process>& processes) {
  std::vector<Sign> signs(processes.size());
  std::set<std::string> different;
  for (const auto& process : processes) different.insert(process.store);
  const std::vector<std::string> stores(different.begin(), different.end());
  stores_->for_each(stores.size(), [&](std::size_t store) {
    for (std::size_t i = 0; i < processes.size(); ++i) {
      if (processes[i].store == stores[store]) signs[i] = look(processes[i].store, processes[i].name);
    }
  });
  return signs;
}

}  // namespace lockstep::cluster
