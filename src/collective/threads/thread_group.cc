// The threads backend: ranks are threads of one process, so that every buffer is within reach.
#include <bit>

#include "base/text.h"
#include "collective/direct/direct_group.h"

namespace lockstep {
namespace {

class ThreadGroup final : public DirectGroup {
 public:
  ThreadGroup(const std::shared_ptr<SharedSpace>& space, int rank, Patience patience, std::int64_t generation)
      : DirectGroup(std::make_shared<SpaceMember>(space, rank, generation, patience)) {}

  const char* name() const override { return "threads"; }
  std::int64_t generation() const override { return member()->generation(); }

  // The first member makes the space and tells the others its address; it lives until all have taken their share.
  std::shared_ptr<GroupBackend> make(Bootstrap& members, Deadline deadline) const override {
    std::shared_ptr<SharedSpace> space;
    if (members.rank() == 0) space = std::make_shared<SharedSpace>(layout(members.size(), 0));
    auto* const mine = &space;
    const auto all = members.all_gather(text(reinterpret_cast<std::uintptr_t>(mine)), deadline);
    if (members.rank() != 0) space = *reinterpret_cast<std::shared_ptr<SharedSpace>*>(std::stoull(all[0]));
    members.all_gather("taken", deadline);
    return std::make_shared<ThreadGroup>(space, members.rank(), member()->patience(), members.generation());
  }

  Memory allocate(std::size_t bytes) override { return private_memory(bytes); }

 private:
  std::int64_t place_of(const Buffer& buffer) const override { return std::bit_cast<std::intptr_t>(buffer.data); }
  std::byte* at_place(std::int64_t place) const override { return std::bit_cast<std::byte*>(place); }
};

}  // namespace

std::vector<Group> make_thread_groups(int size, int spin) {
  if (size < 1) throw InvalidArgument(text("make_thread_groups: size is ", size, "; it must be at least 1"));
  const auto space = std::make_shared<SharedSpace>(DirectGroup::layout(size, 0));
  std::vector<Group> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.emplace_back(std::make_shared<ThreadGroup>(space, rank, Patience{.spins = spin}, 0));
  }
  return groups;
}

}  // namespace lockstep
