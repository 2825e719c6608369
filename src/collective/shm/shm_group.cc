// The shm backend: ranks are processes of one host. What `allocate` gave is within every rank's reach; other buffers
// pass through windows.
#include <algorithm>

#include "base/resources.h"
#include "collective/direct/direct_group.h"
#include "collective/make.h"
#include "transport/heap.h"
#include "transport/shared_meeting.h"

namespace lockstep {
namespace {

class ShmGroup final : public DirectGroup {
 public:
  ShmGroup(std::shared_ptr<SpaceMember> member, const Place& place, const GroupOptions& options)
      : DirectGroup(std::move(member)),
        place_(place),
        options_(options),
        heap_(std::make_shared<Heap>(space().heap(rank()), space().layout().heap_bytes)) {}

  const char* name() const override { return "shm"; }
  std::int64_t generation() const override { return member()->generation(); }

  std::shared_ptr<GroupBackend> make(Bootstrap& members, Deadline deadline) const override {
    return make_shm_backend(members, place_, options_, deadline);
  }

  Memory allocate(std::size_t bytes) override {
    return {heap_->take(bytes),
            [heap = heap_, keep = member()->shared_space()](std::byte* memory) { heap->give_back(memory); }};
  }

 private:
  SharedSpace& space() const { return member()->space(); }

  std::int64_t place_of(const Buffer& buffer) const override {
    if (!heap_->contains(buffer.data, buffer.bytes())) return Post::kPrivate;
    return static_cast<std::byte*>(buffer.data) - space().begin();
  }

  std::byte* at_place(std::int64_t place) const override { return space().begin() + place; }

  const Place place_;
  const GroupOptions options_;
  const std::shared_ptr<Heap> heap_;
};

}  // namespace

std::shared_ptr<GroupBackend> make_shm_backend(Bootstrap& members, const Place& place, const GroupOptions& options,
                                               Deadline deadline) {
  constexpr std::size_t kMostInAll = std::size_t{1} << 44;  // an eighth of what a process can address
  const auto fair = kMostInAll / static_cast<std::size_t>(members.size());
  const auto heap = options.heap_bytes > 0 ? options.heap_bytes : std::min(usable_memory_bytes(), fair);
  std::vector<int> names;
  for (int r = 0; r < members.size(); ++r) names.push_back(members.name_of(r));
  const auto all_gather = [&](const std::string& mine) { return members.all_gather(mine, deadline); };
  return std::make_shared<ShmGroup>(
      meet_in_shared_memory(members.rank(), DirectGroup::layout(members.size(), heap), members.generation(),
                            patience_in_memory(members.size(), place.cores), names, all_gather, deadline),
      place, options);
}

}  // namespace lockstep
