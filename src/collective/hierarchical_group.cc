// The hierarchical backend: what crosses hosts crosses once a host, and what stays inside goes through shared memory.
// After Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy", MLSys
// 2019.
#include <algorithm>
#include <map>

#include "collective/make.h"
#include "collective/message_passing/message_group.h"
#include "kernels/reduce.h"

namespace lockstep::collective {
namespace {

using Kind = Call::Kind;

// With so many bytes every rank of a host carries its slice across; with fewer, one rank carries all.
constexpr std::size_t kSlicedBytes = 32 * 1024;

// The bootstrap of one host's members, over that of all members.
class HostBootstrap final : public cluster::Bootstrap {
 public:
  HostBootstrap(cluster::Bootstrap& all, const std::vector<int>& members) : all_(all), members_(members) {}

  int rank() const override {
    return static_cast<int>(std::find(members_.begin(), members_.end(), all_.rank()) - members_.begin());
  }
  int size() const override { return static_cast<int>(members_.size()); }
  std::int64_t generation() const override { return all_.generation(); }
  int name_of(int rank) const override { return all_.name_of(members_[static_cast<std::size_t>(rank)]); }

  // All hosts call it as often as each other.
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    const auto everybody = all_.all_gather(mine, deadline);
    std::vector<std::string> here;
    for (const int r : members_) here.push_back(everybody[static_cast<std::size_t>(r)]);
    return here;
  }

 private:
  cluster::Bootstrap& all_;
  const std::vector<int> members_;
};

class HierarchicalGroup final : public GroupBackend {
 public:
  HierarchicalGroup(cluster::Bootstrap& members, const Place& place, const std::vector<std::string>& hosts,
                    const GroupOptions& options, Deadline deadline)
      : place_(place), options_(options) {
    std::map<std::string, std::size_t> numbers;
    for (int r = 0; r < members.size(); ++r) {
      const auto number = numbers.emplace(hosts[static_cast<std::size_t>(r)], hosts_.size()).first->second;
      if (number == hosts_.size()) hosts_.emplace_back();
      if (r == members.rank()) {
        my_host_ = number;
        my_place_ = hosts_[number].size();
      }
      hosts_[number].push_back(r);
    }
    even_ =
        std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& host) { return host.size() == hosts_[0].size(); });
    HostBootstrap here(members, hosts_[my_host_]);
    local_ = make_shm_backend(here, place, options, deadline);
    const auto spin = spin_at_sockets(here.size(), place.cores);
    global_ = std::static_pointer_cast<MessageGroup>(
        make_network_backend(options.network, members, place, options, spin, deadline));
  }

  const char* name() const override { return "hierarchical"; }
  int rank() const override { return global_->rank(); }
  int size() const override { return global_->size(); }
  std::int64_t generation() const override { return global_->generation(); }

  const char* run(const Call& call, Deadline deadline) override {
    if (is_message(call)) return exchange({&call, 1}, deadline);
    return on_behalf_of(call, [&] { return run_collective(call, deadline); });
  }

  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    return linked([&] { return global_->exchange(calls, deadline); });
  }

  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    const auto hosts = members.all_gather(place_.host, deadline);
    return std::make_shared<HierarchicalGroup>(members, place_, hosts, options_, deadline);
  }

  Memory allocate(std::size_t bytes) override { return local_->allocate(bytes); }

  void look(const char* operation, bool also_left) override {
    linked([&] {
      global_->look(operation, also_left);
      local_->look(operation, also_left);
      return "";
    });
  }

  transport::ShownNumbers* numbers() override { return global_->numbers(); }

  void fail(const Failure& failure) override {
    local_->fail(failure);
    global_->fail(failure);
  }

 private:
  const char* run_collective(const Call& call, Deadline deadline) {
    global_->check();  // checked first: the failure that all hosts agreed on says more than this host's own
    ++sequence_;
    purpose_ = call.purpose;
    // 16-bit sums may overflow between the levels where their mean does not.
    if (call.op == ReduceOp::mean && kernels::is_half(call.input.dtype) && !even_ && is_reduction(call.kind)) {
      return linked([&] { return global_->run(call, deadline); });
    }
    switch (call.kind) {
      case Kind::barrier: barrier(deadline); break;
      case Kind::all_reduce:
        if (even_ && call.input.bytes() >= kSlicedBytes) return all_reduce_sliced(call, deadline);
        all_reduce_by_leaders(call, deadline);
        break;
      case Kind::broadcast: broadcast(call, deadline); break;
      case Kind::reduce: reduce(call, deadline); break;
      default: return linked([&] { return global_->run(call, deadline); });
    }
    return "hierarchical, leaders";
  }

  // A failure in the local or the global group fails both: neither can see what the other waits for.
  template <class Act>
  const char* linked(const Act& act) {
    try {
      return act();
    } catch (const PeerLost& error) {
      fail(Failure::peer_lost(rank(), error.rank(), "it was lost inside its host or between hosts"));
      throw;
    } catch (const DeadlineExceeded& error) {
      fail(Failure::deadline(rank(), error.ranks(), error.waited_for().count(), error.operation()));
      throw;
    } catch (const Error& error) {
      fail(Failure::aborted(rank(), error.what()));
      throw;
    }
  }

  // A rank of this host that is late may itself wait for another host: the ranks of all hosts find out who is to blame.
  void inside(Call call, Deadline deadline) {
    call.purpose = purpose_;
    linked([&] {
      try {
        return local_->run(call, deadline);
      } catch (const DeadlineExceeded& error) {
        global_->give_up(error.ranks(), deadline, name_of(call.kind));
        throw;
      }
    });
  }

  void across(const std::vector<int>& members, Call call, Deadline deadline) {
    call.purpose = purpose_;
    linked([&] { return global_->run_among(members, call, sequence_, deadline); });
  }

  int me() const { return static_cast<int>(my_place_); }
  const std::vector<int>& host() const { return hosts_[my_host_]; }

  // One rank of each host: `root` of its own, the first of the others.
  std::vector<int> representatives(int root) const {
    std::vector<int> ranks;
    for (const auto& members : hosts_) {
      const bool has_root = std::find(members.begin(), members.end(), root) != members.end();
      ranks.push_back(has_root ? root : members[0]);
    }
    return ranks;
  }

  static int index_of(const std::vector<int>& ranks, int rank) {
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }

  void barrier(Deadline deadline) {
    inside(Call::barrier(), deadline);
    if (me() == 0) across(representatives(0), Call::barrier(), deadline);
    inside(Call::barrier(), deadline);
  }

  // The operator of each level. 16-bit elements keep mean: with equally many ranks a host, the mean of means is the
  // mean.
  static ReduceOp partial(const Call& call) {
    return call.op == ReduceOp::mean && !kernels::is_half(call.input.dtype) ? ReduceOp::sum : call.op;
  }

  void divide_if_mean(const Call& call, const Buffer& part) const {
    if (call.op == ReduceOp::mean && !kernels::is_half(call.input.dtype))
      kernels::divide(part.dtype, part.data, static_cast<std::size_t>(size()), part.count);
  }

  // Rank i of each host reduces slice i inside its host, then with the ranks i of the other hosts.
  const char* all_reduce_sliced(const Call& call, Deadline deadline) {
    const auto places = static_cast<int>(host().size());
    const auto whole = call.output;
    Counts counts;
    for (int p = 0; p < places; ++p) counts.push_back(even_slice(whole.count, whole.dtype, p, places).count());
    const auto slice = even_slice(whole.count, whole.dtype, me(), places);
    const Buffer mine{bytes_of(whole) + slice.begin * size_of(whole.dtype), slice.count(), whole.dtype};
    std::vector<int> peers;
    for (const auto& members : hosts_) peers.push_back(members[my_place_]);

    inside(Call::reduce_scatter(whole, mine, partial(call), counts), deadline);
    across(peers, Call::all_reduce(mine, partial(call)), deadline);
    divide_if_mean(call, mine);
    inside(Call::all_gather(mine, whole, counts), deadline);
    return "hierarchical, slices";
  }

  void all_reduce_by_leaders(const Call& call, Deadline deadline) {
    const auto whole = call.output;
    inside(Call::reduce(whole, whole, partial(call), 0), deadline);
    if (me() == 0) {
      across(representatives(host()[0]), Call::all_reduce(whole, partial(call)), deadline);
      divide_if_mean(call, whole);
    }
    inside(Call::broadcast(whole, 0), deadline);
  }

  void broadcast(const Call& call, Deadline deadline) {
    const auto ranks = representatives(call.peer);
    const int mine = ranks[my_host_];
    if (mine == rank()) across(ranks, Call::broadcast(call.output, index_of(ranks, call.peer)), deadline);
    inside(Call::broadcast(call.output, index_of(host(), mine)), deadline);
  }

  void reduce(const Call& call, Deadline deadline) {
    const auto ranks = representatives(call.peer);
    const int mine = ranks[my_host_];
    const bool root = rank() == call.peer;
    std::vector<std::byte> own(mine == rank() && !root ? call.input.bytes() : 0);
    const Buffer sum{root ? call.output.data : own.data(), mine == rank() ? call.input.count : 0, call.input.dtype};
    inside(Call::reduce(call.input, sum, partial(call), index_of(host(), mine)), deadline);
    if (mine != rank()) return;
    across(ranks, Call::reduce(sum, sum, partial(call), index_of(ranks, call.peer)), deadline);
    if (root) divide_if_mean(call, sum);
  }

  const Place place_;
  const GroupOptions options_;
  std::vector<std::vector<int>> hosts_;  // [host]: its ranks
  std::size_t my_host_ = 0, my_place_ = 0;
  bool even_ = true;  // all hosts have as many ranks
  std::shared_ptr<GroupBackend> local_;
  std::shared_ptr<MessageGroup> global_;
  std::uint32_t sequence_ = 0;  // of collective calls; equal on all ranks
  Purpose purpose_;             // of the call that runs
};

}  // namespace

std::shared_ptr<GroupBackend> make_hierarchical_backend(cluster::Bootstrap& members, const Place& place,
                                                        const std::vector<std::string>& hosts,
                                                        const GroupOptions& options, Deadline deadline) {
  return std::make_shared<HierarchicalGroup>(members, place, hosts, options, deadline);
}

}  // namespace lockstep::collective
