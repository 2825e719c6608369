#include "lockstep/servers/cluster_coordinator.h"

#include <map>
#include <utility>

#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_cluster.h"
#include "parameter_server/servers/server_reduction.h"
#include "parameter_server/servers/servers.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

using parameter_server::Assignment;
using parameter_server::Report;
using parameter_server::Role;

// Prints tensors in their order, as the bytes of an archive.
std::string print(const std::vector<Tensor>& tensors) {
  Archive archive;
  archive.entries["tensors"] = std::to_string(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) throw InvalidArgument(text("tensor ", i, " of a scheduled step is undefined"));
    archive.tensors[std::to_string(i)] = data::to_stored(tensors[i].detach());
  }
  return checkpoint::print_archive(archive);
}

std::vector<Tensor> parse(const char* what, const std::string& printed) {
  const auto archive = checkpoint::parse_archive(what, std::as_bytes(std::span(printed)));
  std::vector<Tensor> tensors;
  for (std::int64_t i = 0; i < archive.integer("tensors"); ++i) {
    tensors.push_back(data::from_stored(archive.tensor(std::to_string(i))));
  }
  return tensors;
}

}  // namespace

struct ClusterCoordinator::State {
  explicit State(std::shared_ptr<StrategyImpl> of) : strategy(std::move(of)) {}

  const std::shared_ptr<StrategyImpl> strategy;
  servers::Servers& kind = servers::servers_of(*strategy);
  parameter_server::ServerCluster& servers = kind.cluster();
  std::map<std::string, Step> steps = {};
  bool running = false;

  double step_seconds() const { return strategy->settings().timeouts.step; }

  // Returns the chief's queue. Throws InvalidArgument in other processes.
  const std::shared_ptr<parameter_server::StepQueue>& queue() const {
    if (servers.is_chief()) return servers.coordinator().steps();
    throw InvalidArgument("ClusterCoordinator: only the chief schedules steps and waits for them");
  }
  void begin(std::int64_t call) const {
    for (const auto& path : kind.paths_of_loops()) {
      const auto& client = servers::client_of(*path);
      if (servers.was_trained(client)) continue;  // the program has to restore a checkpoint
      servers.claims_first_values(client);
      if (servers.tell_training(client)) path->remote()->store(strategy->deadline());
      servers.coordinator().set_trained_by_program(client.model());
    }
    servers.coordinator().begin_steps(call);
  }

  void require_known() const {
    for (const auto& path : kind.paths_of_loops()) servers.require_known(servers::client_of(*path));
  }

  void work(std::int64_t call) const {
    std::optional<Report> report;
    while (true) {
      const auto ask = [&](auto& chief, Deadline deadline) {
        return chief.next(call, servers.roles().index, report, deadline);
      };
      const auto next = servers.ask_chief(ask, {}, /*is_short=*/false);
      report.reset();
      if (next.kind == Assignment::Kind::over) return;
      if (next.kind == Assignment::Kind::task) report = compute(next);
    }
  }

  Report compute(const Assignment& next) const {
    Report report{.kind = Report::Kind::finished, .task = next.task, .chief = next.chief};
    const auto paths = kind.paths_of_loops();
    try {
      const auto step = steps.find(next.function);
      if (step == steps.end()) throw InvalidArgument(text("no step \"", next.function, "\" is defined here"));
      for (const auto& path : paths) {
        path->remote()->fetch_changed(strategy->deadline());
        servers::client_of(*path).begin(next);
      }
      report.output = print(step->second(parse("a step's arguments", next.arguments)));
      if (report.output.size() > parameter_server::kLongestOutput) {
        throw InvalidArgument(text("it returns ", std::exchange(report.output, "").size(), " bytes; the most is ",
                                   parameter_server::kLongestOutput));
      }
    } catch (const std::exception& error) {
      const bool is_incomplete = dynamic_cast<const parameter_server::IncompleteUpdate*>(&error) != nullptr;
      report.kind = is_incomplete ? Report::Kind::incomplete : Report::Kind::failed;
      report.error = error.what();
    }
    for (const auto& path : paths) servers::client_of(*path).end();
    return report;
  }
};

std::vector<Tensor> RemoteValue::fetch() const {
  return parse("a step's result", queue_->fetch(*result_, step_seconds_));
}

ClusterCoordinator::ClusterCoordinator(const ParameterServerStrategy& strategy)
    : state_(std::make_shared<State>(internal::Unwrap::pointer(strategy))) {
  const auto& mode = state_->servers.mode();
  if (mode.parts == 1 && mode.most_ahead < 0) return;
  throw InvalidArgument(
      "ClusterCoordinator: its steps are asynchronous, so the strategy can be neither synchronous nor have a "
      "staleness_bound");
}

void ClusterCoordinator::define(const std::string& name, Step step) {
  if (state_->steps.emplace(name, std::move(step)).second) return;
  throw InvalidArgument(text("ClusterCoordinator: a step \"", name, "\" is defined already"));
}

void ClusterCoordinator::run(const std::function<void()>& program) {
  auto& servers = state_->servers;
  if (std::exchange(state_->running, true)) throw InvalidArgument("ClusterCoordinator::run: it runs already");
  const std::shared_ptr<void> ended(nullptr, [state = state_](void*) { state->running = false; });
  const auto call = servers.next_call("ClusterCoordinator::run");
  if (!servers.is_chief()) {
    if (servers.roles().mine == Role::worker) state_->work(call);
    servers.outcome(call);
    return;
  }
  if (servers.outcome_before_restart(call)) return;
  try {
    state_->begin(call);
    program();
    servers.end(call, parameter_server::outcome_of(""));
  } catch (const std::exception& error) {
    servers.end(call, parameter_server::outcome_of_failure(error.what()));
    throw;
  }
}

RemoteValue ClusterCoordinator::schedule(const std::string& name, const std::vector<Tensor>& arguments) {
  if (!state_->steps.contains(name)) {
    std::vector<std::string> names;
    for (const auto& [defined, step] : state_->steps) names.push_back(text("\"", defined, "\""));
    throw InvalidArgument(text("ClusterCoordinator: no step \"", name, "\" is defined; there ",
                               names.empty() ? "is none" : "are " + lockstep::join(names)));
  }
  const auto& queue = state_->queue();
  state_->require_known();
  const double step_seconds = state_->step_seconds();
  return {queue, queue->schedule(name, print(arguments), step_seconds), step_seconds};
}

void ClusterCoordinator::join() { state_->queue()->join(state_->step_seconds()); }

bool ClusterCoordinator::done() const { return !state_->servers.is_chief() || state_->queue()->done(); }

void ClusterCoordinator::pull_variables() {
  for (const auto& path : state_->kind.paths_of_loops()) path->remote()->fetch(state_->strategy->deadline());
}

PerWorkerValues<DistributedIterator> ClusterCoordinator::create_per_worker_dataset(
    const std::function<Dataset(const InputContext&)>& make) const {
  return PerWorkerValues<DistributedIterator>([strategy = state_->strategy, make] {
    const auto& roles = servers::servers_of(*strategy).cluster().roles();
    const InputContext context{.num_input_pipelines = roles.workers,
                               .input_pipeline_id = roles.mine == Role::worker ? roles.index : 0,
                               .num_replicas_in_sync = strategy->topology().all_replicas()};
    return DistributedDataset(make(context), Distribution::one_each, strategy->local_replicas()).iterate();
  });
}

}  // namespace lockstep
