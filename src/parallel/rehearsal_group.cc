#include "parallel/rehearsal_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::parallel {

class Rehearsal::Backend final : public GroupBackend {
 public:
  Backend(int ranks, int rank) : ranks_(ranks), rank_(rank) {}

  const char* name() const override { return "rehearsal"; }
  int rank() const override { return rank_; }
  int size() const override { return ranks_; }
  std::int64_t generation() const override { return 0; }

  const char* run(const Call& call, Deadline /*deadline*/) override {
    counted_.push_back({call.kind, static_cast<double>(std::max(call.input.bytes(), call.output.bytes()))});
    const auto* const from = static_cast<const std::byte*>(call.input.data);
    auto* const to = static_cast<std::byte*>(call.output.data);
    // Where the output has parts of several ranks, each is the input; where the input has, the output is the first.
    for (std::size_t at = 0; from != nullptr && at < call.output.bytes(); at += call.input.bytes()) {
      if (call.input.bytes() == 0) break;
      if (to + at != from) std::memmove(to + at, from, std::min(call.input.bytes(), call.output.bytes() - at));
    }
    return name();
  }

  const char* exchange(std::span<const Call> /*calls*/, Deadline /*deadline*/) override {
    throw Error("rehearsal: messages between two ranks are not rehearsed");
  }
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline /*deadline*/) const override {
    return std::make_shared<Backend>(members.size(), members.rank());
  }
  Memory allocate(std::size_t bytes) override { return collective::private_memory(bytes); }
  void fail(const Failure& /*failure*/) override {}

  std::vector<Counted> take() { return std::exchange(counted_, {}); }

 private:
  const int ranks_, rank_;
  std::vector<Counted> counted_;
};

Rehearsal::Rehearsal(int ranks, int rank) : backend_(std::make_shared<Backend>(ranks, rank)), ranks_(Group(backend_)) {}

bool Rehearsal::runs_on(const Communicator& ranks) {
  return dynamic_cast<const Backend*>(ranks.group().shared_backend().get()) != nullptr;
}

std::vector<Rehearsal::Counted> Rehearsal::take() { return backend_->take(); }

}  // namespace lockstep::parallel
