#include "strategy/workers.h"

#include <cmath>

#include "base/text.h"
#include "elastic/membership.h"

namespace lockstep::strategy {
namespace {

// Returns the topology without the other workers, who find each other later.
Topology topology_of(const StrategySettings& settings) {
  auto topology = settings.kind->topology();
  topology.replicas = static_cast<int>(settings.devices.size());
  topology.came_later = settings.workers && settings.workers->membership && settings.workers->membership->is_newcomer();
  return topology;
}

}  // namespace

Workers::Workers(const StrategySettings& settings)
    : kind_(*settings.kind),
      settings_(settings.workers),
      batch_(settings.worker_batch),
      timeouts_(settings.timeouts),
      topology_(topology_of(settings)) {}

void Workers::regroup(const elastic::Change& change) {
  membership()->regroup(change, Deadline::after(std::chrono::duration<double>(timeouts_.regroup)));
  if (!change.leaves) reconnect();
}

void Workers::join() {
  membership()->take_place();
  reconnect();
}

void Workers::reconnect() { kind_.reconnect(topology_, *settings_, timeouts_); }

// Aborts the Groups that are not those of all workers.
void Workers::abort_apart(const std::string& why) const {
  if (topology_.gradients.size() < topology_.all.size()) topology_.gradients.abort(why);
  topology_.meetings.abort(why);
}

void Workers::form_groups() {
  const int size = topology_.all.size(), of_group = settings_->per_group;
  if (of_group == 0) return;
  if (is_elastic()) {  // each trains by itself, whoever comes and goes
    topology_.gradients = Communicator();
    topology_.meetings = topology_.all;
    return;
  }
  if (size % of_group != 0) {
    throw InvalidArgument(
        text("workers_per_group is ", of_group, "; the ", size, " workers cannot be divided into such groups"));
  }
  const auto along = [&](int color) {
    return topology_.all.with_group(*topology_.all.group().split(color, 0, topology_.all.deadline()));
  };
  topology_.gradients = along(topology_.all.rank() / of_group);
  topology_.meetings = along(topology_.all.rank() % of_group);
}

Group Workers::replica_group(int replica) const {
  return membership()->replica_group(topology_.replicas, replica, group_options());
}

std::vector<std::string> Workers::hosts() const {
  const auto& processes = membership()->members().processes;
  const auto row = static_cast<std::size_t>(topology_.row_size);
  std::vector<std::string> hosts;
  for (auto rank = static_cast<std::size_t>(topology_.part); rank < processes.size(); rank += row)
    hosts.push_back(processes[rank].host);
  return hosts;
}

double Workers::learning_rate_factor() const {
  if (!batch_) return 1;
  const double ratio = static_cast<double>(topology_.all.size()) / batch_->learning_rate_workers;
  const double factor = batch_->scaling(ratio);
  require(factor > 0 && std::isfinite(factor), text("elastic.worker_batch.scaling(", ratio, ")"), factor, "above 0");
  return factor;
}

void Workers::fail(int replica, const Group& local, const Group* of_all) const {
  std::string why = text("replica ", topology_.first_replica() + replica, " failed");
  const bool has_others = topology_.all.size() > 1;
  bool all_know = false;
  try {
    throw;
  } catch (const PeerLost& error) {
    all_know = is_elastic();
    why = error.what();
  } catch (const std::exception& error) {
    tell_failure(error);
    const auto here = membership() != nullptr ? text(" on ", membership()->world().host) : "";
    if (has_others) why += text(here, ": ", error.what());
  } catch (...) {
  }
  local.abort(why);
  if (all_know) return;
  if (has_others) topology_.all.group().abort(why);
  if (has_others && settings_ && settings_->per_group > 0) abort_apart(why);
  if (of_all != nullptr)
    of_all->abort(why);
  else if (has_others && membership() != nullptr)
    membership()->fail_waiters(why);  // other replicas may be making that Group
}

void Workers::tell_failure(const std::exception& error) const {
  kind_.tell_failure(error);
  if (!is_elastic() || !elastic::is_of_program(error)) return;
  membership()->tell_failure(completed_sections_.count, error);
}

}  // namespace lockstep::strategy
