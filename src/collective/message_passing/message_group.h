// Backends whose ranks have messages only.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collective/backend.h"
#include "collective/message_passing/algorithms.h"
#include "lockstep/collective/make_group.h"

namespace lockstep::collective {

class MessageGroup final : public GroupBackend {
 public:
  using MakeChannels =
      std::function<std::unique_ptr<transport::Channels>(cluster::Bootstrap& members, Deadline deadline)>;

  // `make_channels` connects other members in the same way.
  MessageGroup(const char* name, std::unique_ptr<transport::Channels> channels, std::int64_t generation,
               Implementation implementation, MakeChannels make_channels);

  const char* name() const override { return name_; }
  int rank() const override { return channels_->rank(); }
  int size() const override { return channels_->size(); }
  std::int64_t generation() const override { return generation_; }
  const char* run(const Call& call, Deadline deadline) override;
  const char* exchange(std::span<const Call> calls, Deadline deadline) override;
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override;
  Memory allocate(std::size_t bytes) override { return private_memory(bytes); }
  void fail(const Failure& failure) override { channels_->fail(failure); }

  // Runs `call` among `members` alone, all of which pass the same `sequence`. Ranks in `call` are indices into
  // `members`.
  const char* run_among(const std::vector<int>& members, const Call& call, std::uint32_t sequence, Deadline deadline);

  void look(const char* operation, bool also_left) override { channels_->look(operation, also_left); }
  transport::ShownNumbers* numbers() override { return &channels_->numbers(); }

  // As Channels::check and Channels::give_up.
  void check() { channels_->check(); }
  void give_up(std::span<const int> late, Deadline deadline, const char* operation) {
    channels_->give_up(late, deadline, operation);
  }

 private:
  const char* const name_;
  const std::unique_ptr<transport::Channels> channels_;
  const std::int64_t generation_;
  const Implementation implementation_;
  const MakeChannels make_channels_;
  std::uint32_t sequence_ = 0;  // collective calls
  std::vector<int> everybody_;
  Scratch scratch_;
};

}  // namespace lockstep::collective
