// init, shutdown, ranks and sizes.
#include <array>

#include "base/text.h"
#include "front_ends/horovod/generations.h"
#include "front_ends/horovod/session.h"
#include "lockstep/base/error.h"
#include "lockstep/elastic/job.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {
namespace {

// This rank's place among the hosts, from the local ranks and sizes of all.
Session::Position position_of(const World& world, const Group& group) {
  const std::array<std::int64_t, 2> mine{world.local_rank, world.local_size};
  std::vector<std::array<std::int64_t, 2>> all(static_cast<std::size_t>(world.size));
  group.all_gather({mine.data(), 2, DType::int64}, {all.data(), 2 * all.size(), DType::int64},
                   Deadline::after(std::chrono::minutes(5)));
  Session::Position position{.world = world, .cross_rank = 0, .cross_size = 0};
  for (int r = 0; r < world.size; ++r) {
    const auto [local_rank, local_size] = all[static_cast<std::size_t>(r)];
    if (local_size != world.local_size) position.homogeneous = false;
    if (local_rank != world.local_rank) continue;
    if (r < world.rank) ++position.cross_rank;
    ++position.cross_size;
  }
  return position;
}

}  // namespace

std::shared_ptr<Session> session_of(const World& world, const Communicator& ranks) {
  return std::make_shared<Session>(position_of(world, ranks.group()), ranks);
}

void init(const InitOptions& options) {
  if (Session::exists()) return;
  require(options.timeout_seconds > 0, "horovod::init: timeout_seconds", options.timeout_seconds, "above 0");
  require(options.regroup_seconds > 0, "horovod::init: regroup_seconds", options.regroup_seconds, "above 0");
  const auto cluster = options.cluster ? *options.cluster : resolve_cluster();
  if (!cluster.host_store.empty()) {
    Generations::set(std::make_shared<Generations>(cluster, options));
    return Generations::current()->begin();
  }
  const Job job(cluster, options.group.timeout_seconds);
  Session::set(session_of(job.world(), {job.group(options.group), options.timeout_seconds}));
}

const char* name_of(Op op) {
  switch (op) {
    case Op::average: return "Average";
    case Op::sum: return "Sum";
    case Op::min: return "Min";
    case Op::max: return "Max";
    case Op::product: return "Product";
    case Op::adasum: return "Adasum";
  }
  return "unknown";
}

void shutdown() {
  Session::set(nullptr);
  Generations::set(nullptr);
}
bool is_initialized() { return Session::exists(); }

int rank() { return Session::current()->rank(); }
int size() { return Session::current()->size(); }
int local_rank() { return Session::current()->world().local_rank; }
int local_size() { return Session::current()->world().local_size; }
int cross_rank() { return Session::current()->position().cross_rank; }
int cross_size() { return Session::current()->position().cross_size; }
bool is_homogeneous() { return Session::current()->position().homogeneous; }

}  // namespace lockstep::horovod
