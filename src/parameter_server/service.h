// The calls between the processes of a job with parameter servers, and the engine that carries them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/transport/access.h"
#include "parameter_server/push.h"

namespace lockstep::parameter_server {

class ServedModels;
class SharedBlock;
class ShardStore;

// An update reached some servers and not all. When it is pushed again, those that have it do not take it twice.
class IncompleteUpdate : public ClusterError {
 public:
  using ClusterError::ClusterError;
};

// A model's shards on one server, as another process reads and updates them. Any thread. Calls are repeated until the
// deadline where the server cannot be reached; then they throw DeadlineExceeded, which names it.
class ServerConnection {
 public:
  virtual ~ServerConnection() = default;

  // Waits until the server has the model. Throws InvalidArgument where it describes it otherwise.
  virtual void open(const std::string& description, Deadline deadline) = 0;

  // Lets the server read and write the block where it lies, which saves sending what is in it. False where it cannot,
  // as on another host. The block must not change while a call runs.
  virtual bool share(std::shared_ptr<SharedBlock> block, Deadline deadline) = 0;

  // Returns when the server has the push: the number of the last transfer of its state before that, 0 for none. May be
  // repeated. Throws InvalidArgument for one that does not fit.
  virtual std::int64_t push(Push push, Deadline deadline) = 0;

  // Copies the values of the server's shards, in their order, each as a number of whole updates left it. Waits until
  // they have been written. `versions`: of the values in `shards`, by an earlier call; empty: none. A shard whose
  // version on the server is equal is not copied. The call sets `versions`.
  virtual void pull(std::span<std::byte* const> shards, std::vector<std::int64_t>& versions, Deadline deadline) = 0;

  // Copies rows of a table's shard on the server to `values`: one row an id. Waits as pull does. Throws InvalidArgument
  // for an id that is out of range.
  virtual void pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::span<std::byte> values,
                         Deadline deadline) = 0;

  // Replaces the values. Optimizer state stays.
  virtual std::int64_t write(std::span<const std::byte* const> shards, Deadline deadline) = 0;

  // As ShardStore's, for checkpoints in files that the server reads and writes itself. `cut` is false where the server
  // was started again and has no values yet. `save` is nothing also where it was started again after the cut. `restore`
  // without a chief only checks, and returns what `push` does.
  virtual bool cut(std::int64_t end, Deadline deadline) = 0;
  virtual std::optional<std::int64_t> save(std::int64_t end, const std::string& file, Deadline deadline) = 0;
  virtual std::int64_t restore(const std::string& checkpoint, std::optional<std::int64_t> chief, Deadline deadline) = 0;
};

inline constexpr std::size_t kLongestOutput = std::size_t{256} << 20;  // bytes that a scheduled step may return

// The chief's answer to a worker that asks for work.
struct Assignment {
  enum class Kind { task, wait, over } kind = Kind::wait;  // wait: ask again. over: the fit has ended
  Task task;
  std::int64_t epoch = 0, index = 0;  // where the task's batch lies in the data
  std::optional<double> learning_rate = {};
  std::int64_t chief = 0, finished = 0;  // Push's
  std::int64_t state = 0;                // how often what `start` gives has changed in this fit

  // For a step that a program has scheduled (ClusterCoordinator): its name, and an archive (checkpoint/safetensors.h).
  std::string function = {}, arguments = {};

  bool operator==(const Assignment&) const = default;
};

// A worker's report of a task that it was given.
struct Report {
  // no_batch: the epoch's data end before it. incomplete: its update reached some servers and not all.
  enum class Kind { finished, no_batch, failed, incomplete } kind = Kind::finished;
  Task task;
  std::int64_t chief = 0;                   // that gave it out
  std::int64_t state = 0;                   // the task's
  std::vector<double> results = {};         // to be summed over the parts of a step
  std::map<int, std::string> buffers = {};  // the worker's own values of the model's buffers that changed, by number
  std::string output = {};                  // of a scheduled step: an archive
  std::string error = {};                   // failed, incomplete: why
  bool leaves = false;                      // the worker is ending, and takes no other task
};

// Any thread. The calls of one program in which all processes take part (fit, evaluate, ClusterCoordinator::run) are
// numbered from 0 on, equally in all processes.
class ChiefConnection {
 public:
  virtual ~ChiefConnection() = default;

  // True where the chief has begun call number `call`, `name`; false, at the deadline or earlier, where it has not for
  // some time. Throws InvalidArgument, also in the chief's running call, where its call of this number has another
  // name. Throws ClusterError where the chief's program has ended without the call.
  virtual bool has_begun(std::int64_t call, const std::string& name, Deadline deadline) = 0;

  // Returns a ChiefState's text, an empty one where the fit has ended; nothing, at the deadline or earlier, where the
  // fit has not begun for some time. A worker calls this before its first task in call number `call`, a fit, and
  // whenever an Assignment has another `state` or `chief`. Throws InvalidArgument, also in the chief's fit, where
  // `plan` differs from the chief's in a line.
  virtual std::optional<std::string> start(std::int64_t call, int worker, const std::string& plan,
                                           Deadline deadline) = 0;

  // The next task of `worker` in the fit that is call number `call`, after what it reports of the one before. Where
  // there is none for some time: Kind::wait, at the deadline or earlier.
  virtual Assignment next(std::int64_t call, int worker, const std::optional<Report>& report, Deadline deadline) = 0;

  // Returns the call's result on the chief, once it has one; else nothing, at the deadline or earlier. kProgram: an
  // empty text, once nobody needs the servers any more.
  static constexpr std::int64_t kProgram = -1;
  virtual std::optional<std::string> outcome(std::int64_t call, Deadline deadline) = 0;
};

// A process of the job; `worker` is its number where it is a worker, else -1.
struct Process {
  std::string name;  // "worker 0", "ps 1"
  int worker = -1;
};

// The chief's own end. It learns when a process has connected, and when the process has gone or does not answer.
class ChiefService : public ChiefConnection {
 public:
  virtual void join(const Process& process) = 0;
  virtual void leave(const Process& process) = 0;
};

// A process answers for these: a server for its models, and the second copies that it has of another server's; the
// chief for its schedule.
struct Services {
  std::shared_ptr<ServedModels> models = {};
  std::shared_ptr<ChiefService> chief = {};
  std::shared_ptr<ServedModels> second_copies = {};
};

// While it lives, the process answers.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual std::string address() const = 0;  // "host:port"
};

// Returns where a process listens now; it may have been started again since the last call.
using FindAddress = std::function<std::string(Deadline deadline)>;

class ServiceEngine {
 public:
  virtual ~ServiceEngine() = default;

  // Listens at an address of this machine; port 0: any. Throws ClusterError where it cannot, or `access` does not allow
  // it.
  virtual std::unique_ptr<Endpoint> serve(const std::string& address, const Access& access,
                                          const Services& services) const = 0;

  // `shard_bytes`: of the model's shards on the server. `row_bytes`: of a row of each of its tables. `server`, `user`:
  // names of the server and of this process. `reconnect_seconds`: how long a server that cannot be reached is called
  // again, within a call's deadline. `second_copies`: of the server's Services. `bfloat16`: gradients of float32 shards
  // and tables are sent rounded to bfloat16, where they are not in shared memory; which these are.
  struct ModelOnServer {
    std::string server, user;
    std::int64_t model = 0;
    std::vector<std::size_t> shard_bytes;
    std::vector<std::size_t> row_bytes = {};
    double reconnect_seconds = kReconnectTimeoutSeconds;
    bool second_copies = false;
    struct {
      std::vector<bool> shards = {}, tables = {};
    } bfloat16 = {};
  };
  virtual std::shared_ptr<ServerConnection> connect_server(const ModelOnServer& of, FindAddress address,
                                                           const Access& access) const = 0;

  // Copies the state of a server's shards to this process's own, while pushes to the server wait. False, and nothing is
  // copied, where the server has no values. Numbers of transfers ascend.
  virtual bool transfer(const ModelOnServer& of, FindAddress address, const Access& access, std::int64_t number,
                        ShardStore& to, Deadline deadline) const = 0;

  // The chief notices when the result, or the process, has ended.
  virtual std::shared_ptr<ChiefConnection> connect_chief(const Process& self, FindAddress address,
                                                         const Access& access) const = 0;
};

// The engine of gRPC, from the library that the build made for it. Throws ClusterError where it cannot be loaded.
const ServiceEngine& service_engine();

// Shards that two servers have. Reads the first copy and changes both. Each server makes the same updates, so that what
// one has acknowledged is not lost with it. A server that is started again gets the state from the other one. A push or
// restore is repeated that may have reached one server before such a transfer and the other one after the transfer.
std::shared_ptr<ServerConnection> connect_two_copies(std::shared_ptr<ServerConnection> first,
                                                     std::shared_ptr<ServerConnection> second);

}  // namespace lockstep::parameter_server
