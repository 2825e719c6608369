// The threads backend: ranks are threads of one process, so that every buffer is within reach.
#include <bit>

#include <map>

#include "base/mutex.h"
#include "base/text.h"
#include "collective/direct_group.h"
#include "lockstep/collective/group_wrappers.h"
#include "transport/connections.h"

namespace lockstep {
namespace {

// Shared spaces of groups that are being made, by name. One whose maker gave up is gone.
class SpacesOnOffer {
 public:
  std::string offer(const std::shared_ptr<transport::SharedSpace>& space) {
    MutexLock lock(mutex_);
    std::erase_if(spaces_, [](const auto& entry) { return entry.second.expired(); });
    const auto name = transport::random_name();
    spaces_[name] = space;
    return name;
  }

  std::shared_ptr<transport::SharedSpace> take(const std::string& name) {
    MutexLock lock(mutex_);
    const auto space = spaces_[name].lock();
    if (!space) throw ClusterError("the first member of the new group went away");
    return space;
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::weak_ptr<transport::SharedSpace>> spaces_ LOCKSTEP_GUARDED_BY(mutex_);
};
SpacesOnOffer spaces_on_offer;

class ThreadGroup final : public collective::DirectGroup {
 public:
  ThreadGroup(const std::shared_ptr<transport::SharedSpace>& space, int rank, transport::SpinThenBlock spin,
              std::int64_t generation)
      : collective::DirectGroup(std::make_shared<transport::SpaceMember>(space, rank, generation, spin)) {}

  const char* name() const override { return "threads"; }
  std::int64_t generation() const override { return member()->generation(); }

  // The first member makes the space, and keeps it until all have taken their share.
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    std::shared_ptr<transport::SharedSpace> space;
    if (members.rank() == 0) space = std::make_shared<transport::SharedSpace>(layout(members.size()));
    const auto name = members.all_gather(space ? spaces_on_offer.offer(space) : "", deadline)[0];
    if (!space) space = spaces_on_offer.take(name);
    members.all_gather("taken", deadline);
    return std::make_shared<ThreadGroup>(space, members.rank(), member()->spin(), members.generation());
  }

  Memory allocate(std::size_t bytes) override { return collective::private_memory(bytes); }

 private:
  std::int64_t location_of(const ConstBuffer& buffer) override { return std::bit_cast<std::intptr_t>(buffer.data); }
  std::byte* address_at(int, std::int64_t location, std::size_t) const override {
    return std::bit_cast<std::byte*>(location);
  }
  Memory memory_at(int, std::int64_t, std::size_t, const Memory* memory) const override { return *memory; }
};

}  // namespace

std::vector<Group> make_thread_groups(int size, int spin) {
  if (size < 1) throw InvalidArgument(text("make_thread_groups: size is ", size, "; it must be at least 1"));
  const auto space = std::make_shared<transport::SharedSpace>(collective::DirectGroup::layout(size));
  std::vector<Group> groups;
  for (int rank = 0; rank < size; ++rank) {
    const auto backend = std::make_shared<ThreadGroup>(space, rank, transport::SpinThenBlock{.spins = spin}, 0);
    groups.push_back(with_gpus(Group(backend)));
  }
  return groups;
}

}  // namespace lockstep
