#include "parameter_server/model_server.h"

#include <thread>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/served_models.h"

namespace lockstep::parameter_server {
namespace {

constexpr std::chrono::seconds kToRead(5);
constexpr std::chrono::milliseconds kBetweenReads(100);
constexpr std::chrono::hours kToTransfer(24);  // of any size; the other server is lost when it does not answer pings

}  // namespace

ModelServer::ModelServer(const Roles& roles, int copies, Store store, double reconnect_seconds)
    : roles_(roles),
      store_(std::move(store)),
      reconnect_seconds_(reconnect_seconds),
      models_(std::make_shared<ServedModels>(users_of_models(roles))),
      second_copies_(copies == 1 ? nullptr : std::make_shared<ServedModels>(users_of_models(roles))) {}

void ModelServer::close() {
  models_->close();
  if (second_copies_) second_copies_->close();
}

// Empty: it is not there.
std::string ModelServer::status_of(const Model& model) const {
  return store_.compare_set(key_of_model(model.number), "", "", deadline());
}

std::shared_ptr<void> ModelServer::serve(const Model& model) {
  const auto status = status_of(model);
  if (status == kDropped) return nullptr;  // the program has gone past it
  add_first(model, status);
  if (second_copies_) add_second(model, status);
  return {nullptr, [models = models_, second_copies = second_copies_, number = model.number](void*) {
            models->drop(number);
            if (second_copies) second_copies->drop(number);
          }};
}

void ModelServer::add_first(const Model& model, const std::string& status) {
  const int mine = roles_.index;
  auto shards = second_copies_ && !status.empty() ? transferred(model, mine, true) : nullptr;
  const auto warn = [&](const auto&... what) {
    log_warning(
        text("ps ", mine, " was started again: its shards of model number ", model.number, " are those of ", what...));
  };
  if (shards) {
    models_->add_written(model.number, model.description, shards);
    return warn("ps ", second_of(mine, roles_.servers));
  }
  shards = model.make(mine);
  if (status.empty() || status == kWritten) {  // the chief will write its values (again)
    return models_->add(model.number, model.description, shards);
  }
  if (status == kTrained) {
    throw ClusterError(text("ps ", mine, " was started again, and there is no checkpoint from which to restore its ",
                            "shards of model number ", model.number,
                            ": give fit the callback BackupAndRestore, save a Checkpoint in a loop of a ",
                            "ClusterCoordinator, or set replicas_of_shards = 2, with which one server may be lost"));
  }
  const auto steps = restore(model, shards);
  warn("the checkpoint ", parse_checkpoint(status).path, ", of step ", steps,
       ": updates that they got after it are lost");
}

// A first copy that was lost too comes back before the second: its server waits for nobody. A second copy never takes a
// checkpoint by itself, or the two could take different ones.
void ModelServer::add_second(const Model& model, const std::string& status) {
  const int server = first_of_second(roles_.index, roles_.servers);
  const auto until = deadline();
  while (!status.empty()) {
    if (const auto shards = transferred(model, server, false)) {
      second_copies_->add_written(model.number, model.description, shards);
      return log_warning(text("ps ", roles_.index, " was started again: its second copies of ps ", server,
                              "'s shards of model number ", model.number, " are those of ps ", server));
    }
    if (status == kWritten) break;
    if (until.passed()) {
      throw DeadlineExceeded(text("waiting for ps ", server, "'s shards of model number ", model.number),
                             until.waited());
    }
    std::this_thread::sleep_for(kBetweenReads);
  }
  second_copies_->add(model.number, model.description, model.make(server));
}

// The state of `server`'s shards, from one of their copies; null where that has no values.
std::shared_ptr<ShardStore> ModelServer::transferred(const Model& model, int server, bool from_second) {
  const auto number = store_.add(text("transfers of model ", model.number, ", ps ", server), 1, deadline());
  auto shards = model.make(server);
  return model.transfer(server, from_second, number, *shards, Deadline::after(kToTransfer)) ? shards : nullptr;
}

// The chief may be replacing the checkpoint.
std::int64_t ModelServer::restore(const Model& model, const std::shared_ptr<ShardStore>& shards) const {
  const auto until = Deadline::after(kToRead);
  while (true) {
    try {
      const auto chief = store_.add("chiefs", 0, deadline());
      return models_->add_restored(model.number, model.description, shards, parse_checkpoint(status_of(model)), chief);
    } catch (const IoError&) {
      if (until.passed()) throw;
    }
    std::this_thread::sleep_for(kBetweenReads);
  }
}

}  // namespace lockstep::parameter_server
