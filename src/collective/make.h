// How backends between processes are made, by name, and how members of a new group find each other over a group that
// all of them are in.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "cluster/bootstrap.h"
#include "collective/backend.h"
#include "lockstep/collective/group.h"
#include "lockstep/collective/make_group.h"
#include "transport/signal.h"

namespace lockstep::collective {

// A rank's place.
struct Place {
  std::string host;     // ranks that give one name share memory
  std::string address;  // where it listens for ranks of other hosts
  Access access;
  int cores = 1;  // that the ranks of its host may use together
};

// Collective among the members, which all give equal options.
std::shared_ptr<GroupBackend> make_shm_backend(cluster::Bootstrap& members, const Place& place,
                                               const GroupOptions& options, Deadline deadline);

// `network`: "tcp" or "ucx".
std::shared_ptr<GroupBackend> make_network_backend(const std::string& network, cluster::Bootstrap& members,
                                                   const Place& place, const GroupOptions& options,
                                                   transport::SpinThenBlock spin, Deadline deadline);

// The site's MPI library. Ranks are processes that an mpirun started. `spin`: as above, of the TCP beside MPI.
std::shared_ptr<GroupBackend> make_mpi_backend(cluster::Bootstrap& members, const Place& place,
                                               const GroupOptions& options, transport::SpinThenBlock spin,
                                               Deadline deadline);

// Shared memory among the ranks of each host, and options.network among all ranks. `hosts[r]`: the name of rank r's
// host.
std::shared_ptr<GroupBackend> make_hierarchical_backend(cluster::Bootstrap& members, const Place& place,
                                                        const std::vector<std::string>& hosts,
                                                        const GroupOptions& options, Deadline deadline);

// Returns the cores that the ranks of this rank's host may use together, whether each has its own or all share some.
// Collective.
int cores_of_host(cluster::Bootstrap& members, const std::vector<std::string>& hosts, Deadline deadline);

// How ranks that share this many cores wait: on shared memory, and on sockets, where each check is a system call.
transport::SpinThenBlock spin_in_memory(int ranks, int cores);
transport::SpinThenBlock spin_at_sockets(int ranks, int cores);

class GroupBootstrap final : public cluster::Bootstrap {
 public:
  // `members`: ranks in `group`, in the order of their new ranks; this rank is one of them.
  GroupBootstrap(const Group& group, std::vector<int> members, std::int64_t generation)
      : group_(group), members_(std::move(members)), generation_(generation) {}

  int rank() const override {
    return static_cast<int>(std::find(members_.begin(), members_.end(), group_.rank()) - members_.begin());
  }
  int size() const override { return static_cast<int>(members_.size()); }
  std::int64_t generation() const override { return generation_; }

  // The first member gathers the texts and sends them to all.
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    std::vector<std::string> all(members_.size());
    if (rank() != 0) {
      send(mine, members_[0], deadline);
      for (auto& text : all) text = recv(members_[0], deadline);
      return all;
    }
    all[0] = mine;
    for (std::size_t i = 1; i < all.size(); ++i) all[i] = recv(members_[i], deadline);
    for (std::size_t i = 1; i < all.size(); ++i) {
      for (const auto& text : all) send(text, members_[i], deadline);
    }
    return all;
  }

 private:
  void send(std::string text, int to, Deadline deadline) const {
    std::int64_t length = static_cast<std::int64_t>(text.size());
    group_.send(buffer_of(std::span(&length, 1)), to, deadline);
    group_.send({text.data(), text.size(), DType::uint8}, to, deadline);
  }

  std::string recv(int from, Deadline deadline) const {
    std::int64_t length = 0;
    group_.recv(buffer_of(std::span(&length, 1)), from, deadline);
    std::string text(static_cast<std::size_t>(length), '\0');
    group_.recv({text.data(), text.size(), DType::uint8}, from, deadline);
    return text;
  }

  const Group& group_;
  const std::vector<int> members_;
  const std::int64_t generation_;
};

}  // namespace lockstep::collective
