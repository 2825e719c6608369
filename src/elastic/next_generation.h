// The members of a job's next generation: those that remain, and newcomers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "elastic/registry.h"
#include "lockstep/cluster/world.h"

namespace lockstep::elastic {

// A process that waits to be taken in.
struct Newcomer {
  std::string name;  // one word, unique in the job
  std::string host;

  bool operator==(const Newcomer&) const = default;
};

// How a member wants the next generation to differ. Members may want different changes.
struct Change {
  std::vector<int> lost = {};  // ranks that are known to be lost
  std::vector<Newcomer> newcomers = {};
  bool leaves = false;  // this member does
};

// The members of a generation, as one of them sees them.
struct Members {
  World world;                     // of this one
  std::vector<std::string> names;  // [rank], each unique in the job
};

// Of a job's first generation, and the names in it.
std::string name_of_process(int rank);
Members first_members(const World& world);

// This member's view of the next generation. Collective over the others. Those that have gone, and those that do not
// call it by the deadline, are left out. Ranks keep their order, and newcomers come after them; `invitation` returns
// there what they are told. The first list of newcomers that a member enters counts, and the first member that finds
// all entries closes it. What a member that leaves gets is the view of the others, and its rank there means nothing.
//
// Throws ClusterError on a member that the others left out, and InvalidArgument for ranks that do not exist.
Members next_generation(const Members& now, Registry& registry, const Change& change, Deadline deadline);

// While what it returns lives, the others see that this process does.
std::shared_ptr<void> show_presence(const Store& store, const std::string& name);
std::string key_of_end(const std::string& name);  // the entry that it leaves behind

// Whether a process has gone; and the first rank, but this one's, whose process has.
bool has_gone(const std::string& name, Registry& registry, Deadline deadline);
std::optional<int> first_gone(const Members& members, Registry& registry, Deadline deadline);

// Waits for the place that the newcomer gets among the members. Its host and address are `self`'s. Throws ClusterError
// where it is refused, and DeadlineExceeded.
Members invitation(const World& self, Registry& registry, const std::string& newcomer, Deadline deadline);
bool was_invited(Registry& registry, const std::string& newcomer, Deadline deadline);

// A newcomer that cannot be taken in gets a ClusterError with `reason`.
void refuse(Registry& registry, const std::string& newcomer, const std::string& reason, Deadline deadline);

}  // namespace lockstep::elastic
