#include "grpc_service/connections.h"

#include <algorithm>
#include <list>
#include <thread>

#include "base/text.h"
#include "grpc_service/caller.h"
#include "grpc_service/shared_with.h"
#include "grpc_service/status.h"
#include "lockstep/base/error.h"

namespace lockstep::grpc_service {
namespace {

using parameter_server::Assignment;
using parameter_server::FindAddress;
using parameter_server::Process;
using parameter_server::ServiceEngine;

// Rows that are sent, in memory that gRPC may hold.
class OwnRows {
 public:
  explicit OwnRows(std::shared_ptr<const void> other) : other_(std::move(other)) {}
  void add(const parameter_server::Rows& rows, std::size_t row_bytes, Bulk& bulk) {
    const auto& ids = ids_.emplace_back(rows.ids.begin(), rows.ids.end());
    const auto& values = values_.emplace_back(rows.values, rows.values + ids.size() * row_bytes);
    bulk.parts.push_back(std::as_bytes(std::span(ids)));
    bulk.parts.emplace_back(values);
  }

 private:
  const std::shared_ptr<const void> other_;  // what is sent beside them
  std::list<std::vector<std::int64_t>> ids_;
  std::list<std::vector<std::byte>> values_;
};

class GrpcServerConnection final : public parameter_server::ServerConnection {
 public:
  GrpcServerConnection(const ServiceEngine::ModelOnServer& of, FindAddress address, const Access& access)
      : model_(of.model),
        user_(of.user),
        shard_bytes_(of.shard_bytes),
        row_bytes_(of.row_bytes),
        caller_(of.server, std::move(address), access, of.reconnect_seconds) {}

  void open(const std::string& description, Deadline deadline) override {
    Request request;
    request.mutable_open()->set_model(model_);
    request.mutable_open()->set_user(user_);
    request.mutable_open()->set_description(description);
    caller_.call(std::move(request), deadline);
  }

  bool share(std::shared_ptr<parameter_server::SharedBlock> block, Deadline deadline) override {
    block_ = block;
    shared_ = SharedWith::make(caller_, std::move(block), deadline);
    return shared_ != nullptr;
  }

  void push(parameter_server::Push push, Deadline deadline) override {
    try {
      send(push, deadline);
    } catch (const UnknownBlock&) {  // the server was started again
      share(block_, deadline);
      send(push, deadline);
    }
  }

  void pull(std::span<std::byte* const> shards, Deadline deadline) override {
    try {
      fetch(shards, deadline);
    } catch (const UnknownBlock&) {
      share(block_, deadline);
      fetch(shards, deadline);
    }
  }

  void pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::span<std::byte> values,
                 Deadline deadline) override {
    if (ids.empty()) return;
    Request request;
    request.mutable_pull_rows()->set_model(model_);
    request.mutable_pull_rows()->set_table(table);
    request.mutable_pull_rows()->set_rows(ids.size());
    const auto copy = std::make_shared<const std::vector<std::int64_t>>(ids.begin(), ids.end());
    caller_.call(std::move(request), deadline, {.parts = {std::as_bytes(std::span(*copy))}, .owner = copy},
                 {&values, 1});
  }

  // From a copy: gRPC may still hold the memory of a call that has failed.
  void write(std::span<const std::byte* const> shards, Deadline deadline) override {
    Request request;
    request.mutable_write()->set_model(model_);
    const auto copy = std::make_shared<std::vector<std::vector<std::byte>>>();
    Bulk bulk{.parts = {}, .owner = copy};
    for (std::size_t i = 0; i < shards.size(); ++i) {
      copy->emplace_back(shards[i], shards[i] + shard_bytes_[i]);
      bulk.parts.emplace_back(copy->back());
    }
    caller_.call(std::move(request), deadline, bulk);
  }

  bool cut(std::int64_t end, Deadline deadline) override {
    Request request;
    request.mutable_cut()->set_model(model_);
    request.mutable_cut()->set_end(end);
    return caller_.call(std::move(request), deadline).done();
  }

  bool save(std::int64_t end, const std::string& file, Deadline deadline) override {
    Request request;
    request.mutable_save()->set_model(model_);
    request.mutable_save()->set_end(end);
    request.mutable_save()->set_file(file);
    return caller_.call(std::move(request), deadline).done();
  }

  void restore(const std::string& checkpoint, bool change, std::int64_t chief, Deadline deadline) override {
    Request request;
    request.mutable_restore()->set_model(model_);
    request.mutable_restore()->set_checkpoint(checkpoint);
    request.mutable_restore()->set_change(change);
    request.mutable_restore()->set_chief(chief);
    caller_.call(std::move(request), deadline);
  }

 private:
  void send(const parameter_server::Push& push, Deadline deadline) {
    Request request;
    auto& head = *request.mutable_push();
    head.set_model(model_);
    head.mutable_task()->set_step(push.task.step);
    head.mutable_task()->set_part(push.task.part);
    head.set_weight(push.weight);
    if (push.learning_rate) head.set_learning_rate(*push.learning_rate);
    head.set_chief(push.chief);
    head.set_finished(push.finished);
    Bulk bulk{.parts = {}, .owner = block_};  // lives longer than what gRPC holds of a call that failed
    if (push.memory != nullptr) bulk.owner = push.memory;
    const auto offsets = offsets_of(push.gradients);
    const bool any_shared = std::any_of(offsets.begin(), offsets.end(), [](auto offset) { return offset >= 0; });
    if (any_shared) name(offsets, *head.mutable_shared());
    for (std::size_t i = 0; i < push.gradients.size(); ++i) {
      head.mutable_present()->push_back(push.gradients[i] == nullptr ? '\0' : '\1');
      if (push.gradients[i] != nullptr && offsets[i] < 0) bulk.parts.emplace_back(push.gradients[i], shard_bytes_[i]);
    }
    const auto rows = std::make_shared<OwnRows>(bulk.owner);
    for (std::size_t i = 0; i < push.rows.size(); ++i) {
      head.add_rows(push.rows[i].ids.size());
      rows->add(push.rows[i], row_bytes_[i], bulk);
    }
    if (!push.rows.empty()) bulk.owner = rows;
    caller_.call(std::move(request), deadline, bulk);
  }

  void fetch(std::span<std::byte* const> shards, Deadline deadline) {
    Request request;
    auto& head = *request.mutable_pull();
    head.set_model(model_);
    const auto offsets = offsets_of(shards);
    if (shared_ != nullptr && std::all_of(offsets.begin(), offsets.end(), [](auto offset) { return offset >= 0; })) {
      name(offsets, *head.mutable_shared());
      caller_.call(std::move(request), deadline);
      return;
    }
    std::vector<std::span<std::byte>> parts;
    for (std::size_t i = 0; i < shards.size(); ++i) parts.emplace_back(shards[i], shard_bytes_[i]);
    caller_.call(std::move(request), deadline, {}, parts);
  }

  // Where the shards lie in the shared block; -1 where they do not.
  template <class Pointers>
  std::vector<std::int64_t> offsets_of(const Pointers& shards) const {
    std::vector<std::int64_t> offsets;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      offsets.push_back(shared_ == nullptr ? -1 : shared_->block()->offset_of(shards[i], shard_bytes_[i]));
    }
    return offsets;
  }

  void name(const std::vector<std::int64_t>& offsets, Shards& shards) const {
    shards.set_block(shared_ == nullptr ? -1 : shared_->number());
    shards.mutable_offsets()->Add(offsets.begin(), offsets.end());
  }

  const std::int64_t model_;
  const std::string user_;
  const std::vector<std::size_t> shard_bytes_, row_bytes_;
  Caller caller_;
  std::shared_ptr<parameter_server::SharedBlock> block_;
  std::unique_ptr<SharedWith> shared_;  // the block; null where the server cannot access it
};

// Keeps a stream to the chief, by whose end the chief learns that this process has gone.
class Presence {
 public:
  Presence(Process self, FindAddress address, const Access& access)
      : self_(std::move(self)),
        caller_("the chief", std::move(address), access),
        thread_([this](auto stop) { stay(stop); }) {}

  ~Presence() {
    thread_.request_stop();
    MutexLock lock(mutex_);
    if (context_ != nullptr) context_->TryCancel();
    changed_.notify_all();
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  static constexpr std::chrono::seconds kToConnect{5};
  static constexpr std::chrono::milliseconds kBetweenAttempts{200};

  void stay(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      grpc::ClientContext context;
      if (!use(&context, stop)) return;
      try {
        Request request;
        request.mutable_stay()->set_process(self_.name);
        request.mutable_stay()->set_worker(self_.worker);
        Reply reply;
        if (const auto stream = caller_.open(std::move(request), context, reply, Deadline::after(kToConnect))) {
          grpc::ByteBuffer frame;
          while (stream->Read(&frame)) {
          }
          stream->Finish();
        }
      } catch (const Error&) {  // the store does not answer
      }
      use(nullptr, stop);
      MutexLock lock(mutex_);
      if (!stop.stop_requested()) changed_.wait_for(mutex_, kBetweenAttempts);
    }
  }

  // False where it is to stop.
  bool use(grpc::ClientContext* context, const std::stop_token& stop) {
    MutexLock lock(mutex_);
    context_ = context;
    return !stop.stop_requested();
  }

  const Process self_;
  Caller caller_;
  Mutex mutex_;
  CondVar changed_;
  grpc::ClientContext* context_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;  // of the stream
  std::jthread thread_;
};

class GrpcChiefConnection final : public parameter_server::ChiefConnection {
 public:
  GrpcChiefConnection(const Process& self, const FindAddress& address, const Access& access)
      : caller_("the chief", address, access), presence_(self, address, access) {}

  std::optional<std::string> start(std::int64_t call, int worker, const std::string& plan, Deadline deadline) override {
    Request request;
    request.mutable_start()->set_call(call);
    request.mutable_start()->set_worker(worker);
    request.mutable_start()->set_plan(plan);
    return caller_.call_for_text(std::move(request), deadline);
  }

  Assignment next(std::int64_t call, int worker, const std::optional<parameter_server::Report>& report,
                  Deadline deadline) override {
    Request request;
    auto& head = *request.mutable_next();
    head.set_call(call);
    head.set_worker(worker);
    if (report) {
      auto& said = *head.mutable_report();
      said.set_kind(static_cast<int>(report->kind));
      said.mutable_task()->set_step(report->task.step);
      said.mutable_task()->set_part(report->task.part);
      said.set_leaves(report->leaves);
      said.set_chief(report->chief);
      said.mutable_results()->Add(report->results.begin(), report->results.end());
      said.set_error(report->error);
      for (const auto& [number, values] : report->buffers) {
        auto& buffer = *said.add_buffers();
        buffer.set_number(number);
        buffer.set_values(values);
      }
    }
    Bulk bulk;
    if (report && !report->output.empty()) {
      const auto output = std::make_shared<const std::string>(report->output);
      head.mutable_report()->set_output_bytes(output->size());
      bulk = {.parts = {std::as_bytes(std::span(*output))}, .owner = output};
    }
    std::string arguments;
    const auto reply = caller_.call(std::move(request), deadline, bulk, arguments);
    const auto& given = reply.assignment();
    if (!reply.has_assignment() || given.kind() < 0 || given.kind() > 2)
      throw Error("the chief: an answer without a task");
    Assignment assignment{.kind = static_cast<Assignment::Kind>(given.kind()),
                          .task = {given.task().step(), given.task().part()},
                          .epoch = given.epoch(),
                          .index = given.index(),
                          .chief = given.chief(),
                          .finished = given.finished(),
                          .function = given.function(),
                          .arguments = std::move(arguments)};
    if (given.has_learning_rate()) assignment.learning_rate = given.learning_rate();
    return assignment;
  }

  std::optional<std::string> outcome(std::int64_t call, Deadline deadline) override {
    Request request;
    request.mutable_outcome()->set_call(call);
    return caller_.call_for_text(std::move(request), deadline);
  }

 private:
  Caller caller_;
  Presence presence_;
};

}  // namespace

std::shared_ptr<parameter_server::ServerConnection> connect_server(const ServiceEngine::ModelOnServer& of,
                                                                   FindAddress address, const Access& access) {
  return std::make_shared<GrpcServerConnection>(of, std::move(address), access);
}

std::shared_ptr<parameter_server::ChiefConnection> connect_chief(const Process& self, FindAddress address,
                                                                 const Access& access) {
  return std::make_shared<GrpcChiefConnection>(self, address, access);
}

}  // namespace lockstep::grpc_service
