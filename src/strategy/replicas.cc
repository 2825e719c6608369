#include "strategy/replicas.h"

#include "lockstep/collective/group_wrappers.h"
#include "strategy/devices.h"

namespace lockstep::strategy {
namespace {

// Counted in rounds of about 20 ns: long enough where replicas end their backward at nearly the same time.
constexpr int kSpinRounds = 2000;

std::vector<c10::Device> torch_devices(const std::vector<std::string>& names) {
  std::vector<c10::Device> devices;
  for (const auto& name : names) devices.push_back(torch_device(name));
  return devices;
}

}  // namespace

Replicas::Replicas(const StrategySettings& settings, const Workers& workers)
    : workers_(workers),
      usable_cpus_(settings.partition.usable_cpu_count()),
      gpu_backend_(settings.gpu_backend),
      timeout_seconds_(settings.timeouts.step),
      devices_(torch_devices(settings.devices)),
      groups_(settings.devices.size()),
      threads_(settings, spin_rounds()) {
  for (const auto device : devices_) random_.push_back(std::make_unique<ops::ReplicaRandom>(device));
  make_local_groups();
}

int Replicas::spin_rounds() const { return count() <= usable_cpus_ ? kSpinRounds : 0; }

const Group& Replicas::group(int replica) const {
  const auto& data = workers_.topology().data;
  if (data.size() == 1) return local_group(replica);
  if (count() == 1) return data.group();
  if (const auto* const made = made_group(replica)) return *made;
  auto& own = groups_[static_cast<std::size_t>(replica)];
  own.group.reset();  // of an earlier generation
  own = {workers_.replica_group(replica), data.regroups()};
  return *own.group;
}

const Group* Replicas::made_group(int replica) const {
  const auto& own = groups_[static_cast<std::size_t>(replica)];
  return own.group && own.regroups == workers_.topology().data.regroups() ? &*own.group : nullptr;
}

void Replicas::make_local_groups() {
  local_groups_ = make_thread_groups(count(), spin_rounds());
  if (gpu_backend_ && *gpu_backend_ != "auto") {
    for (auto& group : local_groups_) group = with_gpus(group, *gpu_backend_);
  }
  if (workers_.topology().data.size() > 1) return;
  for (std::size_t i = 0; i < gradient_ranks_.size(); ++i) gradient_ranks_[i].regroup(local_groups_[i]);
}

const std::vector<Communicator>& Replicas::gradient_ranks() {
  if (!gradient_ranks_.empty()) return gradient_ranks_;
  run([this](int replica) { group(replica); });
  for (int replica = 0; replica < count(); ++replica)
    gradient_ranks_.emplace_back(group(replica), timeout_seconds_, "replica");
  return gradient_ranks_;
}

void Replicas::fail(int replica) const { workers_.fail(replica, local_group(replica), made_group(replica)); }

}  // namespace lockstep::strategy
