#include "parameter_server/servers/led_by_chief.h"

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/state.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_checkpoint.h"
#include "parameter_server/servers/follow_chief.h"
#include "parameter_server/servers/server_reduction.h"
#include "train/model_impl.h"

namespace lockstep::servers {
namespace {

Deadline deadline_of(const ModelImpl& impl) { return unwrap(impl.strategy).deadline(); }

}  // namespace

std::optional<std::string> LedByChief::begin(const std::string& name, const Follow& follow) {
  const auto number = servers_.next_call(name);
  if (!servers_.is_chief()) return follow ? follow(number) : servers_.outcome(number);
  call_ = number;
  return servers_.outcome_before_restart(number);
}

void LedByChief::end(const std::function<std::string()>& outcome) {
  fetch();
  servers_.end(call_, parameter_server::outcome_of(outcome()));
}

void LedByChief::fail(const std::exception& error) {
  servers_.end(call_, parameter_server::outcome_of_failure(error.what()));
}

void LedByChief::once(const std::function<void()>& act) const {
  if (is_in_fit()) return act();
  servers_.once(act);
}

const parameter_server::Client& LedByChief::client() const { return client_of(*impl_.gradients); }

void LedByChief::prepare_fit(const Dataset& data) {
  if (!servers_.restarted()) return;
  impl_.build_for(data, "fit");
  const auto path = servers_.last_checkpoint(client());
  if (!path) return;
  impl_.state.weights().load(with_own_variables(read_archive(*path)), "")();
  fetch();
}

std::unique_ptr<train::StepSource> LedByChief::steps(const Dataset& data, const FitOptions& options) const {
  return assigned_steps(impl_, servers_, call_, data, options);
}

double LedByChief::weight_of_sum(const ReplicaContext& replica) const {
  return replica.local_replica_id() == 0 ? 1.0 / static_cast<double>(servers_.mode().parts) : 0;
}

void LedByChief::fetch() const {
  Lead::fetch();
  if (impl_.gradients && servers_.is_chief())
    load_reported_buffers(*impl_.parameters, servers_.coordinator().buffers());
}

void LedByChief::write_file(const train::StateFile& file) const {
  once([&] { file.weights_only ? Lead::write_file(file) : write_with_servers(file.path); });
}

void LedByChief::require_background(const char* callback) const {
  throw InvalidArgument(text(callback,
                             ": background is not for strategies with parameter servers, which write a "
                             "checkpoint without stopping the steps anyway"));
}

// Writes a checkpoint in which servers write the values that they have.
void LedByChief::write_with_servers(const std::string& path) const {
  const auto own_state = [&] {
    load_reported_buffers(*impl_.parameters, servers_.coordinator().buffers());
    auto archive = checkpoint::archive_of(impl_.state.all());
    for (const auto& slot : impl_.parameters->slots()) {
      if (slot.trainable) archive.tensors.erase(slot.name);
    }
    return archive;
  };
  servers_.require_known(client());
  parameter_server::write_checkpoint(
      servers_.coordinator(), client(), path, own_state, [&] { impl_.gradients->remote()->store(deadline_of(impl_)); },
      deadline_of(impl_));
  servers_.tell_checkpoint(client(), checkpoint::absolute_path(checkpoint_file(path)).string());
}

void LedByChief::load_checkpoint(const std::string& path) const {
  once([&] { load_with_servers(path); });
}

void LedByChief::load_with_servers(const std::string& path) const {
  const auto file = checkpoint::absolute_path(checkpoint_file(path)).string();
  const auto archive = with_own_variables(read_archive(file));
  servers_.coordinator().require_idle(client().model());
  const auto change = impl_.state.all().load(archive, "");
  client().check_restore(file, deadline_of(impl_));
  servers_.restore(client(), file, parameter_server::model_of(archive), deadline_of(impl_));
  change();
  servers_.coordinator().resume(client().model(), servers_.mode(), parameter_server::steps_of(archive).end);
  tell_workers();
  fetch();
}

// Adds this process's values of the variables that servers have.
Archive LedByChief::with_own_variables(Archive archive) const {
  const auto& parameters = *impl_.parameters;
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    const auto& slot = parameters.slots()[i];
    if (slot.trainable) archive.tensors.try_emplace(slot.name, data::to_stored(parameters.parameter(0, i)));
  }
  return archive;
}

void LedByChief::tell_of_weights() const {
  if (impl_.gradients) impl_.gradients->remote()->store(deadline_of(impl_));
  if (servers_.is_chief()) tell_workers();
}

// Tells the workers that they have older values of the state that is not on servers.
void LedByChief::tell_workers() const {
  if (is_in_fit()) return servers_.coordinator().change_state(checkpoint::print_state(impl_.state.beside_servers()));
  servers_.coordinator().forget_buffers();
}

}  // namespace lockstep::servers
