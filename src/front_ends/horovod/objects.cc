// Modules, optimizers and values, from one rank to all.
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <sstream>

#include "base/text.h"
#include "front_ends/horovod/in_process_set.h"
#include "front_ends/horovod/operations.h"
#include "front_ends/horovod/session.h"
#include "lockstep/base/error.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {
namespace {

Buffer bytes_of(std::string& bytes) { return {bytes.data(), bytes.size(), DType::uint8}; }
ConstBuffer bytes_of(const std::string& bytes) { return {bytes.data(), bytes.size(), DType::uint8}; }

std::string pickled(const c10::IValue& object) {
  const auto bytes = torch::pickle_save(object);
  return {bytes.begin(), bytes.end()};
}

// Returns the device of the optimizer's parameters; nothing for several devices. Root's state is on root's GPU.
std::optional<at::Device> device_of(const torch::optim::Optimizer& optimizer) {
  std::optional<at::Device> found;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (found && *found != parameter.device()) return std::nullopt;
      found = parameter.device();
    }
  }
  return found;
}

// In the process set.
bool is_root(const ProcessSet& set, int root_rank) {
  return Session::current()->rank() == InProcessSet::root_of("", set, root_rank);
}

c10::IValue unpickled(const std::string& bytes) { return torch::pickle_load({bytes.begin(), bytes.end()}); }

}  // namespace

std::string broadcast_bytes(const std::string& call, const std::function<std::string()>& make, int root_rank) {
  const auto session = Session::current();
  check_root(call, root_rank, session->size());
  std::string shared;
  std::exception_ptr failed;
  try {
    if (session->rank() == root_rank) shared = make();
  } catch (...) {
    failed = std::current_exception();
  }
  session->run([&] {
    auto mine = Announcement::of(text(call, " from rank ", root_rank));
    mine.own = failed ? -1 : static_cast<std::int64_t>(shared.size());
    const auto bytes = session->negotiate(mine)[static_cast<std::size_t>(root_rank)].own;
    if (bytes < 0 && failed) return;
    if (bytes < 0) throw InvalidArgument(text(call, ": rank ", root_rank, " failed to give what it has"));
    shared.resize(static_cast<std::size_t>(bytes));
    session->carry_out(Call::broadcast(bytes_of(shared), root_rank));
  });
  if (failed) std::rethrow_exception(failed);
  return shared;
}

void broadcast_parameters(torch::nn::Module& module, int root_rank, const ProcessSet& set) {
  std::vector<Handle<Tensor>> started;
  for (const auto& parameter : module.named_parameters()) {
    started.push_back(broadcast_async_(parameter.value(), root_rank, parameter.key(), set));
  }
  for (const auto& buffer : module.named_buffers()) {
    started.push_back(broadcast_async_(buffer.value(), root_rank, buffer.key(), set));
  }
  for (const auto& handle : started) handle.wait();
}

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank, const ProcessSet& set) {
  const InProcessSet in_set(set);
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw InvalidArgument(
        "broadcast_optimizer_state: the state of torch::optim::LBFGS cannot be broadcast, for LibTorch cannot save it; "
        "make the optimizer anew on all ranks, after broadcast_parameters");
  }
  const auto save = [&] {
    std::ostringstream mine;
    torch::save(optimizer, mine);
    return mine.str();
  };
  std::istringstream shared(
      broadcast_bytes(text("broadcast_optimizer_state of a ", c10::demangle(typeid(optimizer).name())), save,
                      InProcessSet::root_of("broadcast_optimizer_state", set, root_rank)));
  if (is_root(set, root_rank)) return;
  optimizer.state().clear();  // load would keep entries that root lacks
  torch::load(optimizer, shared, device_of(optimizer));
}

c10::IValue broadcast_object(const c10::IValue& object, int root_rank, const std::string& name, const ProcessSet& set) {
  const InProcessSet in_set(set);
  const auto shared = broadcast_bytes(
      "broadcast_object" + named(name), [&] { return pickled(object); },
      InProcessSet::root_of("broadcast_object", set, root_rank));
  return is_root(set, root_rank) ? object : unpickled(shared);
}

std::vector<c10::IValue> allgather_object(const c10::IValue& object, const std::string& name, const ProcessSet& set) {
  const InProcessSet in_set(set);
  const auto session = Session::current();
  const auto bytes = pickled(object);
  Counts counts;
  std::string all;
  session->run([&] {
    auto mine = Announcement::of("allgather_object" + named(name));
    mine.own = static_cast<std::int64_t>(bytes.size());
    for (const auto& theirs : session->negotiate(mine)) {
      counts.push_back(static_cast<std::size_t>(theirs.own));
      all.resize(all.size() + counts.back());
    }
    session->carry_out(Call::all_gather(bytes_of(bytes), bytes_of(all), counts));
  });
  std::vector<c10::IValue> objects;
  std::size_t at = 0;
  for (const auto count : counts) {
    objects.push_back(unpickled(all.substr(at, count)));
    at += count;
  }
  return objects;
}

}  // namespace lockstep::horovod
