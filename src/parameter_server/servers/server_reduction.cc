#include "parameter_server/servers/server_reduction.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <deque>
#include <set>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"
#include "optimizer/flat_update.h"

namespace lockstep::servers {
namespace {

Deadline to_share() { return Deadline::after(std::chrono::seconds(10)); }

}  // namespace

std::vector<parameter_server::VariableSpec> variables_of(const ReplicatedParameters& parameters) {
  std::vector<parameter_server::VariableSpec> variables;
  for (const auto& slot : parameters.slots()) {
    if (slot.trainable) variables.push_back({slot.name, ops::dtype_of(slot.dtype), slot.sizes});
  }
  return variables;
}

ServerValues::ServerValues(ReplicatedParameters& parameters, std::shared_ptr<parameter_server::Client> client,
                           double step_seconds)
    : parameters_(parameters),
      client_(std::move(client)),
      step_seconds_(step_seconds),
      variables_(parameters.trainable()) {}

std::unique_ptr<gradient::Reduction> ServerValues::make_reduction() {
  return std::make_unique<ServerReduction>(parameters_, *this, step_seconds_);
}

Memory ServerValues::share() {
  const auto replicas = static_cast<std::size_t>(parameters_.replicas());
  const auto count = 1 + replicas + (replicas > 1 ? 1 : 0);
  auto memory = client_->share(std::max<std::size_t>(1, count * parameters_.flat_bytes()), to_share());
  parameters_.move_first_copy(memory);
  return memory;
}

// The variables' values in copy 0.
std::vector<std::byte*> ServerValues::variables() const {
  std::vector<std::byte*> values;
  for (const auto& variable : variables_) {
    const auto& slot = parameters_.slots()[variable.slot];
    const auto first = parameters_.flat(0, slot.dtype).narrow(0, slot.offset, slot.numel);
    values.push_back(static_cast<std::byte*>(first.mutable_data_ptr()));
  }
  return values;
}

void ServerValues::store(Deadline deadline) {
  const auto values = variables();
  client_->write(std::vector<const std::byte*>(values.begin(), values.end()), deadline);
}

void ServerValues::fetch(Deadline deadline) {
  fetched_.clear();
  fetch_changed(deadline);
}

// How often LibTorch has changed the values in place.
std::int64_t ServerValues::changes_here() const {
  std::int64_t changes = 0;
  for (int replica = 0; replica < parameters_.replicas(); ++replica) {
    for (std::size_t slot = 0; slot < parameters_.slots().size(); ++slot) {
      changes += static_cast<std::int64_t>(parameters_.parameter(replica, slot)._version());
    }
  }
  return changes;
}

void ServerValues::fetch_changed(Deadline deadline) {
  if (changes_here() != changes_when_fetched_) fetched_.clear();
  if (!client_->pull(variables(), fetched_, deadline)) return;
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto& copy : parameters_.flats(dtype).subspan(1)) copy.copy_(parameters_.flat(0, dtype));
  }
  for (int replica = 0; replica < parameters_.replicas(); ++replica) parameters_.refresh(replica);
  changes_when_fetched_ = changes_here();
}

ServerReduction::ServerReduction(const ReplicatedParameters& parameters, ServerValues& values, double step_seconds)
    : Reduction({gradient::ShardMap::even({}, parameters.replicas()), /*processes=*/1,
                 gradient::Ownership::Writes::all_copies},
                /*during_backward=*/true),
      parameters_(parameters),
      values_(values),
      client_(values.client()),
      shares_(gradient::ShardMap::even(parameters.trainable(), parameters.replicas())),
      own_(parameters) {
  std::set<const EmbeddingModule*> seen;
  for (int replica = 0; replica < parameters.replicas(); ++replica) {
    embeddings_.push_back(embeddings_of(parameters, replica));
    if (embeddings_.back().size() != client_->tables().size()) {
      throw InvalidArgument(text("replica ", replica, " has ", embeddings_.back().size(),
                                 " ShardedEmbeddings, and replica 0 has ", client_->tables().size()));
    }
    for (const auto& embedding : embeddings_.back()) {
      if (seen.insert(embedding.get()).second) continue;
      throw InvalidArgument(
          "replicas share a ShardedEmbedding: the function that makes a replica's module must make its own");
    }
  }
  for (const auto& of_replica : embeddings_) {
    for (std::size_t table = 0; table < of_replica.size(); ++table) {
      of_replica[table]->bind(client_, table, step_seconds);
    }
  }
}

ServerReduction::~ServerReduction() {
  for (const auto& of_replica : embeddings_) {
    for (const auto& embedding : of_replica) embedding->unbind(*client_);
  }
}

void ServerReduction::end_step(int replica, StepEnd end) {
  own_.end_step(replica, end);
  for (const auto& embedding : embeddings_[static_cast<std::size_t>(replica)]) embedding->clear();
}

// Returns the memory of a replica's gradients, or, after the last replica's, of the sums.
at::Tensor ServerReduction::gradient_memory(int index, const gradient::ParameterSlot& slot) const {
  const auto number = 1 + static_cast<std::size_t>(index);
  return parameters_.flat_in(memory_, number, slot.dtype).narrow(0, slot.offset, slot.numel);
}

at::Tensor ServerReduction::memory_for(int replica, std::size_t slot) const {
  if (!parameters_.slots()[slot].trainable || memory_ == nullptr) return {};
  return gradient::in_shape_of(parameters_.parameter(replica, slot),
                               gradient_memory(replica, parameters_.slots()[slot]));
}

void ServerReduction::add(int replica, std::size_t slot, const at::Tensor& gradient) {
  if (!gradient.defined()) return own_.add(replica, slot, gradient);
  if (memory_ == nullptr) throw InvalidArgument(parameter_server::kOutsideOfStep);
  own_.add(replica, slot, gradient::placed_in(gradient_memory(replica, parameters_.slots()[slot]), gradient));
}

gradient::Sums ServerReduction::finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) {
  const auto own = own_.finish(replicas, weight, check_finite, deadline);
  const int replica = replicas.rank();
  if (parameters_.replicas() > 1) {
    add_up(replica, own);
    replicas.barrier(deadline);
  }
  if (replica == 0) push(own, deadline);
  replicas.barrier(deadline);
  return own;
}

void ServerReduction::add_up(int replica, const gradient::Sums& own) {
  for (const auto& shard : shares_.of(replica)) {
    const auto& slot = parameters_.slots()[shard.slot];
    const auto add = [&]<class T>(T) {
      std::vector<const T*> parts;
      for (const auto& part : own.parts) {
        if (part[shard.slot].defined()) parts.push_back(part[shard.slot].template const_data_ptr<T>() + shard.begin);
      }
      if (parts.empty()) return;
      const auto sums = gradient_memory(parameters_.replicas(), slot);
      optimizer::sum_gradients<T>(parts, {}, sums.mutable_data_ptr<T>() + shard.begin,
                                  static_cast<std::size_t>(shard.count));
    };
    if (slot.dtype == at::kDouble) {
      add(double());
    } else {
      add(float());
    }
  }
}

void ServerReduction::push(const gradient::Sums& own, Deadline deadline) {
  std::vector<const std::byte*> gradients;
  for (const auto& variable : shares_.owned()) {
    const auto& slot = parameters_.slots()[variable.slot];
    const bool any = std::any_of(own.parts.begin(), own.parts.end(),
                                 [&](const auto& part) { return part[variable.slot].defined(); });
    const int sums = parameters_.replicas() == 1 ? 0 : parameters_.replicas();
    gradients.push_back(any ? static_cast<const std::byte*>(gradient_memory(sums, slot).const_data_ptr()) : nullptr);
  }
  parameter_server::Push push{.weight = own.weight};
  std::deque<parameter_server::SumOfRows> sums;
  for (std::size_t table = 0; table < client_->tables().size(); ++table) {
    const auto parts = rows_of_table(table);
    if (parts.size() > 1) sums.emplace_back(client_->tables()[table], parts, client_->servers());
    push.rows.push_back(parts.empty() ? parameter_server::Rows() : parts.size() > 1 ? sums.back().rows() : parts[0]);
  }
  client_->push(std::move(push), gradients, deadline);
}

// Returns the rows that all replicas used.
std::vector<parameter_server::Rows> ServerReduction::rows_of_table(std::size_t table) const {
  std::vector<parameter_server::Rows> parts;
  for (const auto& of_replica : embeddings_) {
    for (const auto& used : of_replica[table]->used()) parts.push_back(used->gradient_rows());
  }
  return parts;
}

parameter_server::Client& client_of(const GradientPath& path) {
  return *dynamic_cast<const ServerValues&>(*path.remote()).client();
}

}  // namespace lockstep::servers
