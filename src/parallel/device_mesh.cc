#include "lockstep/parallel/device_mesh.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/text.h"
#include "elastic/membership.h"
#include "elastic/newcomers.h"
#include "lockstep/cluster/cluster.h"
#include "parallel/mesh_backend.h"

namespace lockstep {
namespace {

std::string list(const std::vector<DeviceMesh::Axis>& axes) {
  std::vector<std::string> words;
  for (const auto& axis : axes) words.push_back(text(axis.name, " ", axis.size));
  return join(words);
}

std::vector<DeviceMesh::Axis> agreed(std::vector<DeviceMesh::Axis> axes, const Communicator& ranks) {
  ranks.check_all_agree("axes of a DeviceMesh", list(axes));
  return axes;
}

// Fills in the size that is -1.
std::vector<DeviceMesh::Axis> checked(std::vector<DeviceMesh::Axis> axes, int ranks) {
  const auto fail = [&](const auto&... what) {
    throw InvalidArgument(text("DeviceMesh(", list(axes), "): ", what...));
  };
  DeviceMesh::Axis* open = nullptr;
  std::int64_t product = 1;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    auto& axis = axes[i];
    if (axis.name.empty()) fail("axis ", i, " has no name");
    const auto same = [&](const auto& other) { return other.name == axis.name; };
    if (std::ranges::count_if(axes, same) > 1) fail("two axes are called \"", axis.name, "\"");
    if (axis.size == -1) {
      if (open != nullptr) fail("the size of one axis alone may be -1");
      open = &axis;
    } else if (axis.size < 1) {
      fail("axis \"", axis.name, "\" has size ", axis.size, "; it must be above 0, or -1 for all ranks that are left");
    } else {
      product *= axis.size;
    }
  }
  if (open != nullptr) {
    if (ranks % product != 0) fail("the number of ranks, ", ranks, ", is not a multiple of ", product);
    open->size = ranks / static_cast<int>(product);
  } else if (product != ranks) {
    fail("the product of the sizes is ", product, ", but there ",
         ranks == 1 ? "is 1 rank" : text("are ", ranks, " ranks"),
         "; start as many processes, for example by `lockstep run -n ", product, "`");
  }
  return axes;
}

std::string coordinates(const std::vector<DeviceMesh::Axis>& axes, int ranks, int rank) {
  std::vector<std::string> words;
  for (const auto& axis : axes) {
    ranks /= axis.size;
    words.push_back(text(axis.name, " ", rank / ranks % axis.size));
  }
  return join(words);
}

// The ranks in the order of the mesh: hosts in the order of their first ranks.
std::vector<int> order_by_host(const std::vector<std::string>& hosts) {
  std::map<std::string, int> first;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) first.try_emplace(hosts[rank], static_cast<int>(rank));
  std::vector<int> order(hosts.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int rank) { return first.at(hosts[static_cast<std::size_t>(rank)]); });
  return order;
}

int number_of_ranks(const std::vector<DeviceMesh::Axis>& axes) {
  return std::accumulate(axes.begin(), axes.end(), 1,
                         [](int product, const auto& axis) { return product * axis.size; });
}

std::vector<DeviceMesh::Axis> in_one_row(std::vector<DeviceMesh::Axis> axes) {
  axes.at(0).size = 1;
  return axes;
}

void check_elastic(const std::vector<DeviceMesh::Axis>& axes) {
  if (axes.empty()) throw InvalidArgument("DeviceMesh: elastic is for a mesh with an axis");
  for (const auto& axis : in_one_row(axes)) {
    if (axis.size > 0) continue;
    throw InvalidArgument(text("DeviceMesh(", list(axes), "): elastic: the size of axis \"", axis.name, "\" is ",
                               axis.size, "; it must be above 0, for all axes but the first"));
  }
}

}  // namespace

struct DeviceMesh::State {
  State(std::vector<Axis> of, const Communicator& given, const std::string& host)
      : axes(checked(agreed(std::move(of), given), given.size())) {
    const auto order = order_by_host(given.all_gather(host));
    const auto place = std::ranges::find(order, given.rank()) - order.begin();
    const auto all = *given.group().split(0, static_cast<int>(place), given.deadline());
    ranks = given.with_group(all);
    for (std::size_t i = 0; i < axes.size(); ++i) along.push_back(given.with_group(all));
    take(all);
  }

  // `all`: the Group of all ranks, in the order of the mesh. `elastic`: of an elastic job's later generations.
  void take(const Group& all, std::optional<parallel::MeshGroups::Elastic> elastic = {}) {
    std::vector<int> numbers(static_cast<std::size_t>(all.size()));
    std::iota(numbers.begin(), numbers.end(), 0);
    const auto groups = std::make_shared<parallel::MeshGroups>(
        [axes = axes, size = all.size()](int rank) { return coordinates(axes, size, rank); }, std::move(elastic));
    const auto whole = std::make_shared<parallel::MeshBackend>(all.shared_backend(), groups, std::move(numbers));
    groups->set_whole(whole);
    const auto deadline = groups->elastic() ? Deadline::after(groups->elastic()->to_make) : ranks.deadline();
    ranks.regroup(all.with_backend(whole));
    int stride = all.size();
    for (std::size_t i = 0; i < axes.size(); ++i) {
      stride /= axes[i].size;
      const int coordinate = ranks.rank() / stride % axes[i].size;
      along[i].regroup(*ranks.group().split(ranks.rank() - coordinate * stride, coordinate, deadline));
    }
  }

  // The mesh of a process that comes to a running job.
  State(std::vector<Axis> of, const Cluster& cluster, const DeviceMeshOptions& with)
      : axes(in_one_row(std::move(of))), options(with) {
    const auto newcomer = Job::newcomer(cluster, with.group.timeout_seconds);
    int stride = number_of_ranks(axes);
    claim.emplace(newcomer.stores(), newcomer.world(), stride);
    take_membership(std::make_shared<elastic::JobMembership>(newcomer, stride, claim->part()));
    ranks = Communicator(newcomer.group(with.group), with.timeout_seconds);  // this rank alone
    for (const auto& axis : axes) {
      stride /= axis.size;
      const parallel::Rehearsal rehearsal(axis.size, claim->part() / stride % axis.size);
      along.push_back(axis.size > 1 ? ranks.with_group(rehearsal.ranks().group())
                                    : Communicator(newcomer.group(with.group), with.timeout_seconds));
    }
  }

  void take_membership(std::shared_ptr<elastic::JobMembership> of) {
    membership = std::move(of);
    job = membership->job();
  }

  // The number of this rank's part in a row's copy of a model.
  int part() const { return claim ? claim->part() : ranks.rank() % number_of_ranks(in_one_row(axes)); }

  std::vector<Axis> axes;
  std::shared_ptr<elastic::JobMembership> membership;  // null where it was made of a Communicator
  std::optional<Job> job;                              // its job, of this generation
  DeviceMeshOptions options;
  std::optional<elastic::ClaimedPart> claim;  // of a newcomer
  bool has_elastic_strategy = false;
  Communicator ranks;
  std::vector<Communicator> along;  // [axis]
};

DeviceMesh::DeviceMesh(std::vector<Axis> axes, const Communicator& ranks, const std::string& host)
    : state_(std::make_shared<State>(std::move(axes), ranks, host)) {}

DeviceMesh::DeviceMesh(std::vector<Axis> axes, DeviceMeshOptions options) {
  const auto cluster = resolve_cluster();
  if (options.elastic) check_elastic(axes);
  if (options.elastic && cluster.joins) {
    state_ = std::make_shared<State>(std::move(axes), cluster, options);
    return;
  }
  const Job job(cluster);
  const Communicator ranks(job.group(options.group), options.timeout_seconds);
  state_ = std::make_shared<State>(std::move(axes), ranks, options.elastic ? "" : job.world().host);
  state_->options = options;
  const int row_size = number_of_ranks(in_one_row(state_->axes));
  state_->take_membership(options.elastic && job.stores() != nullptr
                              ? std::make_shared<elastic::JobMembership>(job, row_size, state_->part())
                              : std::make_shared<elastic::JobMembership>(job));
}

bool DeviceMesh::contains(const std::string& axis) const {
  return std::any_of(axes().begin(), axes().end(), [&](const auto& each) { return each.name == axis; });
}

const Communicator& DeviceMesh::operator[](const std::string& axis) const {
  for (std::size_t i = 0; i < axes().size(); ++i) {
    if (axes()[i].name == axis) return state_->along[i];
  }
  throw InvalidArgument(text("DeviceMesh: there is no axis \"", axis, "\"; the mesh has ", list(axes())));
}

void DeviceMesh::regroup(double regroup_seconds) const {
  auto options = state_->options.group;
  options.timeout_seconds = regroup_seconds;
  const auto all = state_->membership->group(options);
  state_->job = state_->membership->job();
  auto& axes = state_->axes;
  const int row_size = number_of_ranks(in_one_row(axes));
  if (all.size() % row_size != 0)
    throw Error(text("DeviceMesh: ", all.size(), " ranks go on, which are no whole rows of ", row_size));
  axes[0].size = all.size() / row_size;
  state_->claim.reset();
  // A Group may take half of the time, so that a rank that waits in vain finds the others waiting for it.
  state_->take(all, parallel::MeshGroups::Elastic{state_->membership->watch_for_losses(),
                                                  std::chrono::duration<double>(regroup_seconds / 2)});
}

const DeviceMeshOptions& DeviceMesh::options() const { return state_->options; }
const std::optional<Job>& DeviceMesh::job() const { return state_->job; }
std::shared_ptr<elastic::Membership> DeviceMesh::membership() const { return state_->membership; }
const Communicator& DeviceMesh::ranks() const { return state_->ranks; }
const std::vector<DeviceMesh::Axis>& DeviceMesh::axes() const { return state_->axes; }

int DeviceMesh::part() const { return state_->part(); }

void DeviceMesh::claim_for_elastic_strategy() const {
  if (std::exchange(state_->has_elastic_strategy, true))
    throw InvalidArgument("ModelParallelStrategy: another elastic strategy uses this mesh; make a mesh for each");
}

std::string DeviceMesh::coordinates_of(int rank) const { return coordinates(axes(), ranks().size(), rank); }

}  // namespace lockstep
