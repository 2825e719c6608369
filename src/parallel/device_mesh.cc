#include "lockstep/parallel/device_mesh.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/text.h"
#include "collective/group_of_generation.h"
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
    if (std::count_if(axes.begin(), axes.end(), same) > 1) fail("two axes are called \"", axis.name, "\"");
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
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return first.at(hosts[static_cast<std::size_t>(a)]) < first.at(hosts[static_cast<std::size_t>(b)]);
  });
  return order;
}

}  // namespace

struct DeviceMesh::State {
  State(std::vector<Axis> of, const Communicator& given, const std::string& host)
      : axes(checked(agreed(std::move(of), given), given.size())) {
    const auto order = order_by_host(given.all_gather(host));
    const auto place = std::find(order.begin(), order.end(), given.rank()) - order.begin();
    const auto all = *given.group().split(0, static_cast<int>(place), given.deadline());
    ranks = given.with_group(all);
    for (std::size_t i = 0; i < axes.size(); ++i) along.push_back(given.with_group(all));
    take(all);
  }

  // `all`: the Group of all ranks, in the order of the mesh.
  void take(const Group& all) {
    std::vector<int> numbers(static_cast<std::size_t>(all.size()));
    std::iota(numbers.begin(), numbers.end(), 0);
    const auto groups = std::make_shared<parallel::MeshGroups>(
        [axes = axes, size = all.size()](int rank) { return coordinates(axes, size, rank); });
    const auto whole = std::make_shared<parallel::MeshBackend>(all.shared_backend(), groups, std::move(numbers));
    groups->set_whole(whole);
    ranks.regroup(all.with_backend(whole));
    int stride = all.size();
    for (std::size_t i = 0; i < axes.size(); ++i) {
      stride /= axes[i].size;
      const int coordinate = ranks.rank() / stride % axes[i].size;
      along[i].regroup(*ranks.group().split(ranks.rank() - coordinate * stride, coordinate, ranks.deadline()));
    }
  }

  std::vector<Axis> axes;
  std::optional<Job> job;
  GroupOptions group;  // of the job's processes
  Communicator ranks;
  std::vector<Communicator> along;  // [axis]
};

DeviceMesh::DeviceMesh(std::vector<Axis> axes, const Communicator& ranks, const std::string& host)
    : state_(std::make_shared<State>(std::move(axes), ranks, host)) {}

DeviceMesh::DeviceMesh(std::vector<Axis> axes, double timeout_seconds, GroupOptions group) {
  const auto job = Job::from_environment();
  state_ = std::make_shared<State>(std::move(axes), Communicator(job.group(group), timeout_seconds), job.world().host);
  state_->job = job;
  state_->group = std::move(group);
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

void DeviceMesh::regroup(const Job& job, double timeout_seconds) const {
  auto options = state_->group;
  options.timeout_seconds = timeout_seconds;
  const auto all = collective::group_of_generation(job, options);
  auto& axes = state_->axes;
  const auto row_size = std::accumulate(axes.begin() + 1, axes.end(), 1, [](int product, const Axis& axis) { return product * axis.size; });
  axes[0].size = all.size() / row_size;
  state_->job = job;
  state_->take(all);
}

const std::optional<Job>& DeviceMesh::job() const { return state_->job; }
const Communicator& DeviceMesh::ranks() const { return state_->ranks; }
const std::vector<DeviceMesh::Axis>& DeviceMesh::axes() const { return state_->axes; }

std::string DeviceMesh::coordinates_of(int rank) const { return coordinates(axes(), ranks().size(), rank); }

}  // namespace lockstep
