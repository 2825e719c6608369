#include "parameter_server/server_cluster.h"

#include <map>
#include <sstream>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/own_files.h"
#include "cluster/liveness.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"
#include "lockstep/base/version.h"
#include "optimizer/rules.h"
#include "parameter_server/served_models.h"
#include "parameter_server/service.h"
#include "transport/socket.h"

namespace lockstep::parameter_server {
namespace {

constexpr std::chrono::seconds kToEnd(5);
constexpr std::chrono::milliseconds kBetweenLooks(200);

std::string key_of_outcome(std::int64_t call) { return text("outcome ", call); }

constexpr std::size_t kLongestStored = 1 << 20;  // bytes of the store's values

// Begins the keys of this process's next cluster in the store: all processes make theirs in one order. The store is
// known by an entry: another store may have its address later.
std::string prefix(const Store& store, int rank, Deadline deadline) {
  static Mutex mutex;
  static std::map<std::string, int> made;  // [store and rank]; guarded by mutex
  const auto name = store.compare_set("name of this store", "", checkpoint::random_digits(), deadline);
  MutexLock lock(mutex);
  return text("parameter servers ", made[text(name, " ", rank)]++, "/");
}

std::string key_of(Role role, int index) { return text(name_of(role), " ", index); }

Store find(const Cluster& cluster, double start_seconds) {
  if (!(start_seconds > 0)) {
    throw InvalidArgument(
        text("ParameterServerStrategy: start_timeout_seconds is ", start_seconds, "; it must be above 0"));
  }
  const auto deadline = Deadline::after(std::chrono::duration<double>(start_seconds));
  const auto store = cluster::find_store(cluster, deadline).store;
  return store.prefixed(prefix(store, cluster.world.rank, deadline));
}

// A process's entry in the store: its host, and, in the next line, where it answers, if it does.
std::string host_in(const std::string& entry) { return entry.substr(0, entry.find('\n')); }
std::string address_in(const std::string& entry) { return entry.substr(entry.find('\n') + 1); }

std::string description_of(const ModelSpec& model, const std::vector<ShardPlace>& places, const Optimizer& optimizer,
                           const ServerClusterOptions& options) {
  std::ostringstream out;
  const auto& mode = options.mode;
  out << "Lockstep " << version() << "\n"
      << optimizer::describe(optimizer) << "\n"
      << "a step of " << mode.parts << " parts, of which " << mode.needed << " are needed\n"
      << "replicas of shards " << options.replicas_of_shards << "\n";
  for (const auto& variable : model.variables) {
    out << "variable " << variable.name << " " << lockstep::name_of(variable.dtype) << " [" << join(variable.shape)
        << "]\n";
  }
  for (const auto& place : places) {
    out << "variable " << place.variable << " from " << place.begin << " on, " << place.count << " elements, on server "
        << place.server << "\n";
  }
  for (const auto& table : model.tables) {
    out << "table " << table.name << " " << lockstep::name_of(table.dtype) << " [" << table.rows << ", " << table.width
        << "], seed " << table.seed << ", initializer " << static_cast<int>(table.initializer.kind) << " "
        << table.initializer.scale << ", rows admitted after " << table.admit_after << " updates, removed after "
        << table.evict_after << " steps\n";
  }
  return out.str();
}

bool is_failure(const std::string& outcome) { return !outcome.starts_with("1"); }

std::string result_of(const std::string& outcome) {
  if (!is_failure(outcome)) return outcome.substr(1);
  throw Error(text("the chief: ", outcome.substr(1)));
}

}  // namespace

std::string outcome_of(const std::string& result) { return "1" + result; }
std::string outcome_of_failure(const std::string& why) { return "0" + why; }

ServerCluster::ServerCluster(const Cluster& cluster, ServerClusterOptions options, const ServiceEngine& engine)
    : roles_(roles_of(cluster)),
      options_(std::move(options)),
      engine_(engine),
      store_([&] {
        check(options_.mode);
        return find(cluster, options_.start_seconds);
      }()),
      access_(store_.access()) {
  const auto deadline = Deadline::after(std::chrono::duration<double>(options_.start_seconds));
  if (roles_.mine == Role::ps) {
    server_.emplace(roles_, options_.replicas_of_shards, store_, options_.reconnect_seconds);
  }
  if (is_chief()) {
    const auto number = store_.add("chiefs", 1, deadline);
    restarted_ = number > 1;
    coordinator_ =
        std::make_shared<Coordinator>(roles_.workers, options_.reconnect_seconds, number, options_.replicas_of_shards);
  }
  auto entry = cluster.world.host + "\n";
  if (server_ || coordinator_) {
    const auto host = cluster::host_of(store_.address(), "the store's address");
    const auto address = transport::address_towards(host, deadline);
    Services services{.chief = coordinator_};
    if (server_) services.models = server_->models(), services.second_copies = server_->second_copies();
    endpoint_ = engine_.serve(transport::with_port(address, 0), access_, services);
    entry += endpoint_->address();
  }
  store_.set(key_of(roles_.mine, roles_.index), entry, deadline);
  wait_for_all(deadline);
  if (!is_chief()) {
    const Process self{key_of(roles_.mine, roles_.index), roles_.mine == Role::worker ? roles_.index : -1};
    chief_ = engine_.connect_chief(self, address_of(Role::chief, 0), access_);
  }
}

// A server answers until the chief has ended its program, or does not answer; the chief until all others have ended,
// for a bounded time.
ServerCluster::~ServerCluster() {
  try {
    const auto deadline = reconnect_deadline();
    if (is_chief()) {
      coordinator_->end_program(std::uncaught_exceptions() > exceptions_);
      coordinator_->wait_for_joining(others_of(roles_), Deadline::after(kToEnd));  // a program may end very soon
      if (!coordinator_->wait_for_leaving(name_of(Role::ps), deadline)) {
        log_warning("some workers have not ended yet; the servers end all the same");
      }
      wait_for_servers(deadline);
      coordinator_->end(ChiefConnection::kProgram, "");
      coordinator_->wait_for_leaving("", Deadline::after(kToEnd));
    }
    const bool failed = !chief_failed_ && std::uncaught_exceptions() > exceptions_;
    const auto self = key_of(roles_.mine, roles_.index);
    if (roles_.mine == Role::ps && !failed) store_.set(cluster::key_of_end(self), "reached", deadline);
    while (roles_.mine == Role::ps && !failed) {
      if (chief_->outcome(ChiefConnection::kProgram, reconnect_deadline())) break;
    }
  } catch (const Error&) {  // the chief is gone
  }
  if (server_) server_->close();
  if (coordinator_) coordinator_->close();
}

// Until all have reached the end of their programs, or have gone: what one computes may need the others.
void ServerCluster::wait_for_servers(Deadline deadline) const {
  for (int server = 0; server < roles_.servers; ++server) {
    const auto name = key_of(Role::ps, server);
    while (coordinator_->is_present(name) && !deadline.passed()) {
      try {
        store_.get(cluster::key_of_end(name), Deadline::after(kBetweenLooks));
        break;
      } catch (const DeadlineExceeded&) {  // not yet
      }
    }
  }
}

void ServerCluster::wait_for_all(Deadline deadline) {
  std::vector<std::string> names;
  const auto add = [&](Role role, int count) {
    for (int i = 0; i < count; ++i) names.push_back(key_of(role, i));
  };
  add(Role::chief, 1);
  add(Role::worker, roles_.workers);
  add(Role::ps, roles_.servers);
  if (roles_.evaluator) add(Role::evaluator, 1);
  std::vector<std::string> entries;
  try {
    entries = store_.get(names, deadline);
  } catch (const DeadlineExceeded& error) {
    std::vector<std::string> missing;
    for (const int index : error.ranks()) missing.push_back(names[static_cast<std::size_t>(index)]);
    throw DeadlineExceeded("waiting for the other processes", error.waited_for(), {},
                           text(" (", first_of(missing), " did not come)"));
  }
  if (roles_.mine != Role::worker) return;
  std::vector<std::string> hosts;
  for (int worker = 0; worker < roles_.workers; ++worker) {
    hosts.push_back(host_in(entries[static_cast<std::size_t>(worker) + 1]));
  }
  World workers{.rank = roles_.index, .size = roles_.workers};
  cluster::set_host(workers, hosts);
  partition_ = {workers.local_rank, workers.local_size};
}

int ServerCluster::agree_on_replicas(int mine) const {
  constexpr const char* kKey = "replicas of a worker";
  const auto deadline = Deadline::after(std::chrono::duration<double>(options_.start_seconds));
  if (roles_.mine == Role::worker) store_.compare_set(kKey, "", std::to_string(mine), deadline);
  const int agreed = std::stoi(store_.get(kKey, deadline));
  if (roles_.mine == Role::worker && agreed != mine) {
    throw ClusterError(text("ParameterServerStrategy: worker ", roles_.index, " has ", mine, " replicas, and another ",
                            agreed, "; set `devices` to equal numbers"));
  }
  return agreed;
}

FindAddress ServerCluster::address_of(Role role, int index) const {
  return
      [store = store_, key = key_of(role, index)](Deadline deadline) { return address_in(store.get(key, deadline)); };
}

std::shared_ptr<Client> ServerCluster::make_model(const ModelSpec& model, const Optimizer& optimizer) {
  for (const auto& table : model.tables) check(table);
  require_shardable(optimizer);  // in all processes, not on servers alone
  const auto number = models_made_++;
  const auto places = place_shards(model.variables, options_.partitioner, roles_.servers);
  const auto description = description_of(model, places, optimizer, options_);
  const auto connect = [&](int server, bool second_copies) {
    return engine_.connect_server(on_server(number, model, places, server, second_copies),
                                  address_of(Role::ps, holder_of(server, second_copies)), access_);
  };
  const auto transfer = [&](int server, bool second_copies, std::int64_t count, ShardStore& to, Deadline deadline) {
    return engine_.transfer(on_server(number, model, places, server, second_copies),
                            address_of(Role::ps, holder_of(server, second_copies)), access_, count, to, deadline);
  };
  const auto make = [&](int server) {
    return std::make_shared<ShardStore>(model, places, ServerNumber{server, roles_.servers}, optimizer, options_.mode);
  };
  std::shared_ptr<void> kept;
  if (is_chief()) kept = keep_for_restarts(number);
  if (server_) kept = server_->serve({number, description, make, transfer});
  std::vector<std::shared_ptr<ServerConnection>> connections;
  for (int server = 0; server < roles_.servers; ++server) {
    connections.push_back(connect(server, false));
    if (options_.replicas_of_shards == 1) continue;
    connections.back() = connect_two_copies(connections.back(), connect(server, true));
  }
  const std::shared_ptr<Client> client(
      new Client(model, places, std::move(connections), number, names_of_states(optimizer)),
      [kept](Client* mine) { delete mine; });
  if (!server_ && find_in_store(key_of_model(number)) != kDropped) {
    client->open(description, Deadline::after(std::chrono::duration<double>(options_.start_seconds)));
  }
  return client;
}

// `server`'s shards of a model, or their second copies.
ServiceEngine::ModelOnServer ServerCluster::on_server(std::int64_t number, const ModelSpec& model,
                                                      const std::vector<ShardPlace>& places, int server,
                                                      bool second_copies) const {
  ServiceEngine::ModelOnServer on_server{.server = key_of(Role::ps, holder_of(server, second_copies)),
                                         .user = key_of(roles_.mine, roles_.index),
                                         .model = number,
                                         .shard_bytes = {},
                                         .reconnect_seconds = options_.reconnect_seconds,
                                         .second_copies = second_copies,
                                         .bfloat16 = {}};
  for (const auto& place : places) {
    if (place.server != server) continue;
    const auto dtype = model.variables[place.variable].dtype;
    on_server.shard_bytes.push_back(static_cast<std::size_t>(place.count) * size_of(dtype));
    if (options_.bfloat16_gradients) on_server.bfloat16.shards.push_back(dtype == DType::float32);
  }
  for (const auto& table : model.tables) {
    on_server.row_bytes.push_back(table.row_bytes());
    if (options_.bfloat16_gradients) on_server.bfloat16.tables.push_back(table.dtype == DType::float32);
  }
  return on_server;
}

// Returns the server that has `server`'s shards, or their second copies.
int ServerCluster::holder_of(int server, bool second_copies) const {
  return second_copies ? second_of(server, roles_.servers) : server;
}

// Empty: it is not there.
std::string ServerCluster::find_in_store(const std::string& key) const {
  return store_.compare_set(key, "", "", reconnect_deadline());
}

// Until the chief has no use for the model any more.
std::shared_ptr<void> ServerCluster::keep_for_restarts(std::int64_t number) const {
  return {nullptr, [store = store_, number](void*) {
            try {
              store.set(key_of_model(number), kDropped, Deadline::after(kToEnd));
            } catch (const Error&) {  // the job is ending
            }
          }};
}

bool ServerCluster::tell_training(const Client& model) {
  if (find_in_store(key_of_model(model.model())) != kWritten) return false;
  store_.set(key_of_model(model.model()), kTrained, reconnect_deadline());
  return true;
}

std::optional<std::string> ServerCluster::last_checkpoint(const Client& model) const {
  const auto saved = find_in_store(key_of_last_checkpoint(model.model()));
  return saved.empty() ? std::nullopt : std::optional(parse_checkpoint(saved).path);
}

bool ServerCluster::claims_first_values(const Client& model) {
  const auto known = store_.compare_set(key_of_model(model.model()), "", kWritten, reconnect_deadline());
  if (known != kWritten) return false;
  if (!coordinator_->knows(model.model())) coordinator_->resume(model.model(), mode(), 0);
  return true;
}

void ServerCluster::tell_checkpoint(const Client& model, const std::string& path) {
  tell(model, {path, model.model()});
}

void ServerCluster::tell(const Client& model, const SavedModel& saved) {
  store_.set(key_of_last_checkpoint(model.model()), print(saved), reconnect_deadline());
  store_.set(key_of_model(model.model()), print(saved), reconnect_deadline());
}

void ServerCluster::restore(const Client& model, const std::string& path, std::optional<std::int64_t> number,
                            Deadline deadline) {
  const auto chief = store_.add("chiefs", 1, reconnect_deadline());
  coordinator_->set_chief(chief);
  model.restore(path, chief, deadline);
  tell(model, {path, number});
}

void ServerCluster::require_known(const Client& model) const {
  if (!was_trained(model)) return;
  throw ClusterError(
      "the chief was started again in a training, and has restored no checkpoint from which that goes on: give fit the "
      "callback BackupAndRestore; in a loop with a ClusterCoordinator restore a Checkpoint before steps are scheduled");
}

bool ServerCluster::was_trained(const Client& model) const {
  if (!restarted() || coordinator_->knows(model.model())) return false;
  const auto known = find_in_store(key_of_model(model.model()));
  return !known.empty() && known != kWritten;
}

void ServerCluster::end(std::int64_t call, const std::string& outcome) {
  if (outcome.size() <= kLongestStored) store_.set(key_of_outcome(call), outcome, reconnect_deadline());
  coordinator_->end(call, outcome);
}

std::optional<std::string> ServerCluster::outcome_before_restart(std::int64_t call) {
  if (!restarted()) return std::nullopt;
  const auto outcome = find_in_store(key_of_outcome(call));
  if (outcome.empty()) return std::nullopt;
  coordinator_->end(call, outcome);
  return result_of(outcome);
}

void ServerCluster::once(const std::function<void()>& act) {
  if (!is_chief()) return;
  const auto key = text("act ", acts_++);
  if (restarted() && !find_in_store(key).empty()) return;
  act();
  store_.set(key, "done", reconnect_deadline());
}

std::int64_t ServerCluster::next_call(const std::string& name) {
  const auto call = calls_++;
  if (is_chief()) {
    coordinator_->begin_call(call, name);
    return call;
  }
  const auto ask = [&](ChiefConnection& chief, Deadline deadline) { return chief.has_begun(call, name, deadline); };
  try {
    while (!ask_chief(ask)) {
    }
  } catch (const InvalidArgument&) {
    chief_failed_ = true;
    throw;
  }
  return call;
}

std::string ServerCluster::outcome(std::int64_t call, const std::function<bool()>& gives_up) {
  const auto ask = [&](ChiefConnection& chief, Deadline deadline) { return chief.outcome(call, deadline); };
  while (true) {
    const auto outcome = ask_chief(ask, gives_up);
    if (!outcome) continue;
    chief_failed_ = is_failure(*outcome);
    return result_of(*outcome);
  }
}

}  // namespace lockstep::parameter_server
