// The shm backend: ranks are processes of one host. All ranks can access memory from `allocate`; other buffers are
// copied through windows.
#include "collective/direct_group.h"
#include "collective/make.h"
#include "transport/shared_heap.h"
#include "transport/shared_space.h"

namespace lockstep::collective {
namespace {

class ShmGroup final : public DirectGroup {
 public:
  ShmGroup(transport::SharedRendezvous rendezvous, const Place& place, const GroupOptions& options)
      : DirectGroup(std::move(rendezvous.member)),
        place_(place),
        options_(options),
        heap_(std::make_shared<transport::SharedHeap>(member()->shared_space(), rank(), std::move(rendezvous.heaps),
                                                      options.heap_bytes)) {}

  const char* name() const override { return "shm"; }
  std::int64_t generation() const override { return member()->generation(); }

  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    return make_shm_backend(members, place_, options_, deadline);
  }

  Memory allocate(std::size_t bytes) override {
    auto* const memory = heap_->take(bytes);
    if (memory == nullptr) return private_memory(bytes);
    return {memory, [heap = heap_](std::byte* given) { heap->give_back(given); }};
  }

 private:
  std::int64_t location_of(const ConstBuffer& buffer) override { return heap_->offset_of(buffer.data, buffer.bytes()); }
  std::byte* address_at(int rank, std::int64_t location, std::size_t bytes) const override {
    return heap_->at(rank, location, bytes);
  }
  void map_new_segments() override { heap_->map_new(); }
  Memory memory_at(int rank, std::int64_t location, std::size_t bytes, const Memory*) const override {
    return {heap_->at(rank, location, bytes), [heap = heap_](std::byte*) {}};
  }

  const Place place_;
  const GroupOptions options_;
  const std::shared_ptr<transport::SharedHeap> heap_;
};
static_assert(CallDescriptor::kPrivate == -1);  // as SharedHeap's

}  // namespace

std::shared_ptr<GroupBackend> make_shm_backend(cluster::Bootstrap& members, const Place& place,
                                               const GroupOptions& options, Deadline deadline) {
  std::vector<int> names;
  for (int r = 0; r < members.size(); ++r) names.push_back(members.name_of(r));
  const auto all_gather = [&](const std::string& mine) { return members.all_gather(mine, deadline); };
  return std::make_shared<ShmGroup>(
      transport::rendezvous_in_shared_memory(members.rank(), DirectGroup::layout(members.size()), members.generation(),
                                             spin_in_memory(members.size(), place.cores), names, all_gather, deadline),
      place, options);
}

}  // namespace lockstep::collective
