#include "cluster/launch/host_part.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <system_error>

#include "base/text.h"
#include "cluster/launch/job_store.h"
#include "cluster/launch/launcher.h"
#include "cluster/launch/launcher_process.h"
#include "cluster/launch/other_launcher.h"
#include "cluster/launch/supervisor.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "lockstep/base/error.h"
#include "lockstep/transport/access.h"
#include "transport/socket.h"

namespace lockstep::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostPart, size, first, count, host, store, roles, restart, command, environment,
                                   folder, log_dir, grace_seconds, restarts, trusted_network, on_terminal, timeline,
                                   elastic, known_stores, token)

namespace {

constexpr std::chrono::seconds kToHearWhatToRun(60), kToStart(10);
constexpr std::chrono::seconds kToHold(30);  // where no other launcher says that the job has ended
constexpr int kBetweenLooksMs = 100;
constexpr double kUntilEtcdKnows = 30;  // seconds: by then its lease has ended, also where etcd had to elect a leader

// Servers compute on the cores of the workers. OpenMP's threads wait actively for some milliseconds, and would keep
// these cores from the servers. So they sleep after a thousand rounds: beside other work that made steps twice as fast,
// and without, it costs nothing measurable.
void spin_briefly(std::map<std::string, std::string>& environment) {
  if (std::getenv("OMP_WAIT_POLICY") == nullptr && std::getenv("GOMP_SPINCOUNT") == nullptr &&
      !environment.contains("OMP_WAIT_POLICY")) {
    environment.try_emplace("GOMP_SPINCOUNT", "1000");
  }
}

// The store of this host, by which the members of an elastic job there agree on who goes on. With etcd it is the job's.
Store store_of_host(const HostPart& part, const Access& access) {
  if (cluster::is_etcd(part.store)) return Store::connect(part.store, Deadline::after(kToStart), access);
  const auto address =
      transport::address_towards(cluster::host_of(part.store, "the store's address"), Deadline::after(kToStart));
  return Store::hold(transport::with_port(address, 0), access);
}

// Tells the job of this host's store. Where this host's ranks come to a job that runs, tells that store of the others.
void publish(const Store& here, const HostPart& part, const Access& access) {
  const auto limit = Deadline::after(kToStart);
  const auto job = cluster::is_etcd(part.store) ? here : Store::connect(part.store, limit, access);
  job.set(cluster::kStoreOfHost + part.host, part.host_store, limit);
  if (part.known_stores.empty()) return;
  here.set(cluster::kKnownStores, join(part.known_stores, "\n"), limit);
  here.set(cluster::kJobHasBegun, "yes", limit);
}

// Called when the ranks have ended. Keeps this host's store while the members need it to agree on who goes on, until
// the other launcher or a signal ends that. Where that launcher is silent, keeps the store for half a minute.
void hold_store(const Store& store, OtherLauncher& launcher, const Signals& signals) {
  using Kind = OtherLauncher::Message::Kind;
  auto limit = Deadline::after(kToHold);
  while (!limit.passed() && signals.next() == 0) {
    if (!launcher.is_silent_for(kShortSilenceSeconds)) limit = Deadline::after(kToHold);
    const auto members = places_of_members(store);
    const auto is_here = [&](const auto& place) { return place.store == store.address(); };
    if (std::none_of(members.begin(), members.end(), is_here)) return;
    for (auto message = launcher.next(); message.kind != Kind::none; message = launcher.next()) {
      if (message.kind == Kind::end || message.kind == Kind::signal) return;
    }
    pollfd polls[] = {{signals.descriptor(), POLLIN, 0}, {launcher.descriptor(), POLLIN, 0}};
    poll(polls, 2, kBetweenLooksMs);
  }
}

}  // namespace

std::vector<ChildCommand> ranks_of(const HostPart& part, const std::string& token_file) {
  std::vector<ChildCommand> ranks;
  for (int local = 0; local < part.count; ++local) {
    const int rank = part.first + local;
    std::map<std::string, std::string> environment{{"LOCKSTEP_RANK", std::to_string(rank)},
                                                   {"LOCKSTEP_SIZE", std::to_string(part.size)},
                                                   {"LOCKSTEP_LOCAL_RANK", std::to_string(local)},
                                                   {"LOCKSTEP_LOCAL_SIZE", std::to_string(part.count)},
                                                   {"LOCKSTEP_HOST", part.host},
                                                   {"LOCKSTEP_STORE", part.store},
                                                   {"LOCKSTEP_RESTART", std::to_string(part.restart)},
                                                   {kTokenFileVariable, token_file},
                                                   {kTrustedNetworkVariable, part.trusted_network ? "1" : "0"},
                                                   {"LOCKSTEP_TERMINAL", part.on_terminal ? "1" : "0"},
                                                   {"LOCKSTEP_TIMELINE", part.timeline ? "1" : "0"}};
    if (!part.host_store.empty()) environment["LOCKSTEP_HOST_STORE"] = part.host_store;
    if (!part.known_stores.empty()) environment["LOCKSTEP_JOIN"] = "1";
    if (!part.roles.empty()) environment["LOCKSTEP_ROLES"] = part.roles;
    environment.insert(part.environment.begin(), part.environment.end());
    const auto [role, index] = part.roles.empty() ? std::pair(std::string(), 0)
                                                  : cluster::role_of(rank, cluster::parse_roles(part.roles, part.size));
    const bool several = role == "worker" || role == "ps";
    // In messages: "ps 0", or "rank 3" where there are no roles.
    const auto name = role.empty() ? text("rank ", rank) : several ? text(role, " ", index) : role;
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

std::unique_ptr<EndPolicy> policy_of(const HostPart& part, const ElasticLimits& limits, JobStore& store,
                                     ChangingHosts* hosts) {
  if (!part.roles.empty()) return end_by_role(part.restarts);
  return part.elastic ? end_elastically(limits, store, hosts) : std::make_unique<EndPolicy>();
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

int launch_part() {
  const Reaper reaper;
  const Signals signals;
  OtherLauncher launcher;
  auto part = part_in(launcher.first(Deadline::after(kToHearWhatToRun)));
  const bool in_etcd = cluster::is_etcd(part.store);
  launcher.set_patience(
      {.after_break_seconds = in_etcd ? kUntilEtcdKnows : 0,
       .silence_seconds = part.elastic ? std::numeric_limits<double>::infinity() : kLongSilenceSeconds});
  std::error_code failed;
  std::filesystem::current_path(part.folder, failed);
  if (failed) throw IoError(text("host ", part.host, " has no folder ", part.folder, ": ", failed.message()));
  make_folder(part.log_dir);
  const TokenFile token(part.token);
  const Access access{token.access().token, part.trusted_network};
  const double silent_seconds = part.elastic ? kShortSilenceSeconds : kLongSilenceSeconds;
  PartOutput output(STDOUT_FILENO, launcher, silent_seconds), errors(STDERR_FILENO, launcher, silent_seconds);
  std::ostream out(&output), err(&errors);
  std::optional<Store> here;
  if (part.elastic) {
    here = store_of_host(part, access);
    part.host_store = here->address();
    publish(*here, part, access);
  }
  JobStore store(part.store, access, here);
  const auto policy = policy_of(part, {.restarts = part.restarts, .is_a_part = true}, store);
  err << kPartIsHereMessage << std::flush;
  if (!launcher.wait_for_begin(Deadline::after(kToHearWhatToRun))) return 1;  // the other launcher says why
  std::optional<Supervisor> ranks;
  try {
    const Supervisor::Job job{*policy, store, part.grace_seconds, &launcher};
    ranks.emplace(ranks_of(part, token.path()), job, LauncherProcess{signals, reaper, out, err});
  } catch (const Error&) {  // none was started, or is left
    err << ranks_ended_message(1) << std::flush;
    throw;
  }
  const int status = ranks->run();
  if (part.elastic && policy->restarts_before_new_start()) err << kNobodyIsLeftMessage;
  err << ranks_ended_message(status) << std::flush;
  if (here && !in_etcd) hold_store(*here, launcher, signals);
  return status;
}

}  // namespace lockstep::launch
