#include "parameter_server/model_server.h"

#include <thread>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/model_status.h"

namespace lockstep::parameter_server {
namespace {

constexpr std::chrono::seconds kToRead(5), kToTransfer(600);
constexpr std::chrono::milliseconds kBetweenReads(100);

}  // namespace

ModelServer::ModelServer(const Roles& roles, int copies, Store store, double timeout_seconds)
    : roles_(roles),
      store_(std::move(store)),
      timeout_seconds_(timeout_seconds),
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
  add(model, status, false);
  if (second_copies_) add(model, status, true);
  return {nullptr, [models = models_, second_copies = second_copies_, number = model.number](void*) {
            models->drop(number);
            if (second_copies) second_copies->drop(number);
          }};
}

void ModelServer::add(const Model& model, const std::string& status, bool second_copies) {
  const int server = second_copies ? first_of_second(roles_.index, roles_.servers) : roles_.index;
  auto& models = second_copies ? *second_copies_ : *models_;
  const auto shards = model.make(server);
  if (status.empty() || status == kWritten) {  // the chief will write its values (again)
    return models.add(model.number, model.description, shards);
  }
  const auto which =
      text(second_copies ? text("its second copies of ps ", server, "'s shards") : std::string("its shards"),
           " of model number ", model.number);
  if (second_copies_ && transfer(model, *shards, second_copies)) {
    models.add_written(model.number, model.description, shards);
    const int from = second_copies ? server : second_of(server, roles_.servers);
    return log_warning(text("ps ", roles_.index, " was started again: ", which, " are those of ps ", from));
  }
  if (status == kTrained) {
    throw ClusterError(
        text("ps ", roles_.index, " was started again, and there is no checkpoint from which to restore ", which,
             ": give fit the callback BackupAndRestore, or ModelCheckpoint without ", "save_weights_only"));
  }
  shards->set_chief(store_.add("chiefs", 0, deadline()));
  restore(model, shards, models);
  log_warning(text("ps ", roles_.index, " was started again: ", which, " are those of the checkpoint ", status));
}

// From the other copy, which may have been lost too: then false.
bool ModelServer::transfer(const Model& model, ShardStore& to, bool second_copies) {
  const int server = second_copies ? first_of_second(roles_.index, roles_.servers) : roles_.index;
  const auto number = store_.add(text("transfers of model ", model.number, ", ps ", server), 1, deadline());
  return model.connect(server, !second_copies)->transfer(number, to, Deadline::after(kToTransfer));
}

// The chief may be replacing the checkpoint.
void ModelServer::restore(const Model& model, const std::shared_ptr<ShardStore>& shards, ServedModels& models) const {
  const auto deadline = Deadline::after(kToRead);
  while (true) {
    try {
      return models.add_restored(model.number, model.description, shards, status_of(model));
    } catch (const IoError&) {
      if (deadline.passed()) throw;
    }
    std::this_thread::sleep_for(kBetweenReads);
  }
}

}  // namespace lockstep::parameter_server
