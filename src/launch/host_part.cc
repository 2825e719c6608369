#include "launch/host_part.h"

#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"
#include "lockstep/transport/access.h"

namespace lockstep::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostPart, size, first, count, host, store, roles, restart, command, environment,
                                   folder, log_dir, grace_seconds, restarts, trusted_network, on_terminal, timeline,
                                   elastic, known_stores, token)

namespace {

// A rank's place in `roles`, and how messages name it: "ps 0", or "rank 3" where there are no roles.
struct Member {
  std::string role, name;
};
Member member_of(const HostPart& part, int rank) {
  if (part.roles.empty()) return {"", text("rank ", rank)};
  const auto [role, index] = cluster::role_of(rank, cluster::parse_roles(part.roles, part.size));
  const bool several = role == "worker" || role == "ps";
  return {role, several ? text(role, " ", index) : role};
}

// Servers compute on the cores of the workers. OpenMP's threads wait actively for some milliseconds, and would keep
// these cores from them; after a thousand rounds they sleep, which made steps twice as fast beside other work and costs
// nothing that can be measured without.
void spin_briefly(std::map<std::string, std::string>& environment) {
  if (std::getenv("OMP_WAIT_POLICY") == nullptr && std::getenv("GOMP_SPINCOUNT") == nullptr &&
      !environment.contains("OMP_WAIT_POLICY")) {
    environment.try_emplace("GOMP_SPINCOUNT", "1000");
  }
}

}  // namespace

std::vector<ChildCommand> ranks_of(const HostPart& part, const std::string& token_file) {
  std::vector<ChildCommand> ranks;
  for (int local = 0; local < part.count; ++local) {
    const int rank = part.first + local;
    auto environment = part.environment;
    environment.insert_or_assign("LOCKSTEP_RANK", std::to_string(rank));
    environment.insert_or_assign("LOCKSTEP_SIZE", std::to_string(part.size));
    environment.insert_or_assign("LOCKSTEP_LOCAL_RANK", std::to_string(local));
    environment.insert_or_assign("LOCKSTEP_LOCAL_SIZE", std::to_string(part.count));
    environment.insert_or_assign("LOCKSTEP_HOST", part.host);
    environment.insert_or_assign("LOCKSTEP_STORE", part.store);
    if (!part.host_store.empty()) environment.insert_or_assign("LOCKSTEP_HOST_STORE", part.host_store);
    if (!part.known_stores.empty()) environment.insert_or_assign("LOCKSTEP_JOIN", "1");
    if (!part.roles.empty()) environment.insert_or_assign("LOCKSTEP_ROLES", part.roles);
    environment.insert_or_assign("LOCKSTEP_RESTART", std::to_string(part.restart));
    environment.insert_or_assign(kTokenFileVariable, token_file);
    environment.insert_or_assign(kTrustedNetworkVariable, part.trusted_network ? "1" : "0");
    environment.insert_or_assign("LOCKSTEP_TERMINAL", part.on_terminal ? "1" : "0");
    environment.insert_or_assign("LOCKSTEP_TIMELINE", part.timeline ? "1" : "0");
    const auto [role, name] = member_of(part, rank);
    if (!role.empty()) spin_briefly(environment);
    ranks.push_back({.name = name + (part.count == part.size ? "" : " on " + part.host),
                     .rank = rank,
                     .prefix = text("[", role.empty() ? std::to_string(rank) : name, "] "),
                     .command = part.command,
                     .environment = std::move(environment),
                     .log_file = part.log_dir.empty() ? "" : text(part.log_dir, "/rank-", rank, ".log"),
                     .redraws = part.on_terminal,
                     .role = role,
                     .dispensable = role == "worker" || role == "evaluator",
                     .ends_job = role == "chief"});
  }
  return ranks;
}

void make_folder(const std::string& path) {
  std::error_code failed;
  if (!path.empty()) std::filesystem::create_directories(path, failed);
  if (failed) throw IoError(text("cannot make ", path, ": ", failed.message()));
}

std::string line_of(const HostPart& part) {
  try {
    return nlohmann::json(part).dump() + "\n";
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument("lockstep run: the command and its environment must be UTF-8");
  }
}

HostPart part_in(const std::string& line) {
  try {
    return nlohmann::json::parse(line).get<HostPart>();
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(text("lockstep run: what to run here cannot be read (another version?): ", error.what()));
  }
}

}  // namespace lockstep::launch
