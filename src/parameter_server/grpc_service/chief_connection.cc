// The connection of another process to the chief.
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/caller.h"
#include "parameter_server/grpc_service/engine.h"

namespace lockstep::grpc_service {
namespace {

using parameter_server::Assignment;
using parameter_server::FindAddress;
using parameter_server::Process;

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
        if (const auto stream = caller_.open(request, context, reply, Deadline::after(kToConnect))) {
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

  bool has_begun(std::int64_t call, const std::string& name, Deadline deadline) override {
    Request request;
    request.mutable_has_begun()->set_call(call);
    request.mutable_has_begun()->set_name(name);
    return caller_.call(std::move(request), deadline).done();
  }

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
      said.set_state(report->state);
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
                          .state = given.state(),
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

std::shared_ptr<parameter_server::ChiefConnection> GrpcEngine::connect_chief(const Process& self, FindAddress address,
                                                                             const Access& access) const {
  return std::make_shared<GrpcChiefConnection>(self, address, access);
}

}  // namespace lockstep::grpc_service
