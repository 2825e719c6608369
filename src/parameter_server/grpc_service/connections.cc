#include "parameter_server/grpc_service/engine.h"

#include <algorithm>
#include <list>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/caller.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/grpc_service/shared_blocks.h"
#include "parameter_server/shard_store.h"

namespace lockstep::grpc_service {

namespace {

using parameter_server::FindAddress;
using parameter_server::ServiceEngine;

// Copies that are sent as bulk, in memory that gRPC may hold longer than its call lasts.
class SentCopies {
 public:
  explicit SentCopies(std::shared_ptr<const void> beside) : beside_(std::move(beside)) {}
  void add(std::span<const std::byte> bytes, Bulk& bulk) {
    bulk.parts.emplace_back(copies_.emplace_back(bytes.begin(), bytes.end()));
  }

  // Adds floats.
  void add_as_bfloat16(std::span<const std::byte> bytes, Bulk& bulk) {
    bulk.parts.emplace_back(copies_.emplace_back(bytes.size() / 2));
    to_bfloat16(bytes, copies_.back());
  }

 private:
  const std::shared_ptr<const void> beside_;  // keeps what else the bulk has
  std::list<std::vector<std::byte>> copies_;
};

bool is_in(const std::vector<bool>& set, std::size_t index) { return index < set.size() && set[index]; }

Request request_to(const ServiceEngine::ModelOnServer& of) {
  Request request;
  request.set_model(of.model);
  request.set_second_copies(of.second_copies);
  return request;
}

class GrpcServerConnection final : public parameter_server::ServerConnection {
 public:
  GrpcServerConnection(const ServiceEngine::ModelOnServer& of, FindAddress address, const Access& access)
      : model_(of), caller_(of.server, std::move(address), access, of.reconnect_seconds) {}

  void open(const std::string& description, Deadline deadline) override {
    auto request = request_to(model_);
    request.mutable_open()->set_user(model_.user);
    request.mutable_open()->set_description(description);
    caller_.call(std::move(request), deadline);
  }

  bool share(std::shared_ptr<parameter_server::SharedBlock> block, Deadline deadline) override {
    return blocks_.add(std::move(block), deadline);
  }

  std::int64_t push(parameter_server::Push push, Deadline deadline) override {
    return blocks_.call(deadline, [&] { return send(push, deadline); });
  }

  void pull(std::span<std::byte* const> shards, std::vector<std::int64_t>& versions, Deadline deadline) override {
    blocks_.call(deadline, [&] { fetch(shards, versions, deadline); });
  }

  void pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::span<std::byte> values,
                 Deadline deadline) override {
    if (!ids.empty()) blocks_.call(deadline, [&] { fetch_rows(table, ids, values, deadline); });
  }

  // Writes from a copy: gRPC may still hold the memory of a call that has failed.
  std::int64_t write(std::span<const std::byte* const> shards, Deadline deadline) override {
    auto request = request_to(model_);
    request.mutable_write();
    const auto copies = std::make_shared<SentCopies>(nullptr);
    Bulk bulk{.parts = {}, .owner = copies};
    for (std::size_t i = 0; i < shards.size(); ++i) copies->add({shards[i], model_.shard_bytes[i]}, bulk);
    return caller_.call(std::move(request), deadline, bulk).last_transfer();
  }

  bool cut(std::int64_t end, Deadline deadline) override {
    auto request = request_to(model_);
    request.mutable_cut()->set_end(end);
    return caller_.call(std::move(request), deadline).done();
  }

  std::optional<std::int64_t> save(std::int64_t end, const std::string& file, Deadline deadline) override {
    auto request = request_to(model_);
    request.mutable_save()->set_end(end);
    request.mutable_save()->set_file(file);
    const auto reply = caller_.call(std::move(request), deadline);
    return reply.done() ? std::optional(reply.updates()) : std::nullopt;
  }

  std::int64_t restore(const std::string& checkpoint, std::optional<std::int64_t> chief, Deadline deadline) override {
    auto request = request_to(model_);
    request.mutable_restore()->set_checkpoint(checkpoint);
    if (chief) request.mutable_restore()->set_chief(*chief);
    return caller_.call(std::move(request), deadline).last_transfer();
  }

 private:
  std::int64_t send(const parameter_server::Push& push, Deadline deadline) {
    auto request = request_to(model_);
    auto& head = *request.mutable_push();
    head.mutable_task()->set_step(push.task.step);
    head.mutable_task()->set_part(push.task.part);
    head.set_weight(push.weight);
    if (push.learning_rate) head.set_learning_rate(*push.learning_rate);
    head.set_chief(push.chief);
    head.set_finished(push.finished);
    Bulk bulk{.parts = {}, .owner = blocks_.owner()};  // lives longer than what gRPC holds of a call that failed
    if (push.memory != nullptr) bulk.owner = push.memory;
    const auto copies = std::make_shared<SentCopies>(bulk.owner);
    head.set_bfloat16(!model_.bfloat16.shards.empty() || !model_.bfloat16.tables.empty());
    const auto shared = shared_shards(push.gradients);
    if (shared.block() >= 0) *head.mutable_shared() = shared;
    for (std::size_t i = 0; i < push.gradients.size(); ++i) {
      head.mutable_present()->push_back(push.gradients[i] == nullptr ? '\0' : '\1');
      const bool sent = push.gradients[i] != nullptr && shared.offsets(static_cast<int>(i)) < 0;
      if (!sent) continue;
      const std::span gradient(push.gradients[i], model_.shard_bytes[i]);
      is_in(model_.bfloat16.shards, i) ? copies->add_as_bfloat16(gradient, bulk) : bulk.parts.push_back(gradient);
    }
    for (std::size_t i = 0; i < push.rows.size(); ++i) {
      const auto& [ids, values] = push.rows[i];
      auto& rows = *head.add_rows();
      const std::span gradients(values, ids.size() * model_.row_bytes[i]);
      rows = shared_rows(ids, gradients);
      if (rows.block() >= 0) continue;
      copies->add(std::as_bytes(ids), bulk);
      is_in(model_.bfloat16.tables, i) ? copies->add_as_bfloat16(gradients, bulk) : copies->add(gradients, bulk);
    }
    bulk.owner = copies;
    return caller_.call(std::move(request), deadline, bulk).last_transfer();
  }

  void fetch(std::span<std::byte* const> shards, std::vector<std::int64_t>& versions, Deadline deadline) {
    auto request = request_to(model_);
    auto& head = *request.mutable_pull();
    head.mutable_known()->Add(versions.begin(), versions.end());
    const auto shared = shared_shards(shards);
    const auto& offsets = shared.offsets();
    if (shared.block() >= 0 && std::all_of(offsets.begin(), offsets.end(), [](auto offset) { return offset >= 0; })) {
      *head.mutable_shared() = shared;
    }
    const auto receive = [&](const Reply& reply, const Caller::ReadFrame& read) {
      if (static_cast<std::size_t>(reply.versions_size()) != shards.size()) {
        throw InvalidArgument(
            text("versions of ", reply.versions_size(), " shards were sent; there are ", shards.size()));
      }
      std::vector<std::span<std::byte>> parts;
      for (std::size_t i = 0; i < shards.size(); ++i) {
        const bool known = i < versions.size() && reply.versions(static_cast<int>(i)) == versions[i];
        if (!head.has_shared() && !known) parts.emplace_back(shards[i], model_.shard_bytes[i]);
      }
      read_bulk(parts, read);
    };
    const auto reply = caller_.call(request, deadline, {}, receive);
    versions.assign(reply.versions().begin(), reply.versions().end());
  }

  void fetch_rows(std::size_t table, std::span<const std::int64_t> ids, std::span<std::byte> values,
                  Deadline deadline) {
    auto request = request_to(model_);
    auto& head = *request.mutable_pull_rows();
    head.set_table(table);
    *head.mutable_rows() = shared_rows(ids, values);
    if (head.rows().block() >= 0) {
      caller_.call(std::move(request), deadline);
      return;
    }
    const auto sent = std::make_shared<SentCopies>(nullptr);
    Bulk bulk{.parts = {}, .owner = sent};
    sent->add(std::as_bytes(ids), bulk);
    caller_.call(std::move(request), deadline, bulk, {&values, 1});
  }

  // Returns where the shards lie in the shared block that has the first of them; its number is -1 where none has.
  template <class Pointers>
  Shards shared_shards(const Pointers& shards) const {
    Shards shared;
    shared.set_block(-1);
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto place = shards[i] == nullptr ? SharedBlocks::Place() : blocks_.find(shards[i], model_.shard_bytes[i]);
      if (shared.block() < 0) shared.set_block(place.block);
      shared.add_offsets(place.block == shared.block() ? place.offset : -1);
    }
    return shared;
  }

  Rows shared_rows(std::span<const std::int64_t> ids, std::span<const std::byte> values) const {
    Rows rows;
    rows.set_count(ids.size());
    rows.set_block(-1);
    if (ids.empty()) return rows;
    const auto of_ids = blocks_.find(ids.data(), ids.size_bytes());
    const auto of_values = blocks_.find(values.data(), values.size());
    if (of_ids.block != of_values.block) return rows;
    rows.set_block(of_ids.block);
    rows.set_ids(of_ids.offset);
    rows.set_elements(of_values.offset);
    return rows;
  }

  const ServiceEngine::ModelOnServer model_;
  Caller caller_;
  SharedBlocks blocks_{caller_};
};

}  // namespace

std::shared_ptr<parameter_server::ServerConnection> GrpcEngine::connect_server(const ModelOnServer& of,
                                                                               FindAddress address,
                                                                               const Access& access) const {
  return std::make_shared<GrpcServerConnection>(of, std::move(address), access);
}

bool GrpcEngine::transfer(const ModelOnServer& of, FindAddress address, const Access& access, std::int64_t number,
                          parameter_server::ShardStore& to, Deadline deadline) const {
  auto request = request_to(of);
  request.mutable_transfer()->set_number(number);
  const auto receive = [&](const Reply& reply, const Caller::ReadFrame& read) {
    if (!reply.done()) return;
    BulkReader bulk(read);
    parameter_server::StateReader state([&](std::span<std::byte> data) { bulk.fill(data); });
    to.receive(state);
  };
  Caller caller(of.server, std::move(address), access, of.reconnect_seconds);
  return caller.call(std::move(request), deadline, {}, receive).done();
}

}  // namespace lockstep::grpc_service

extern "C" const lockstep::parameter_server::ServiceEngine* lockstep_grpc_engine() {
  static const lockstep::grpc_service::GrpcEngine engine;
  return &engine;
}
