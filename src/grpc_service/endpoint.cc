#include "grpc_service/endpoint.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/rpc_service_method.h>
#include <grpcpp/support/method_handler.h>

#include <algorithm>

#include "base/text.h"
#include "grpc_service/frames.h"
#include "grpc_service/messages.pb.h"
#include "grpc_service/proof.h"
#include "grpc_service/status.h"
#include "lockstep/base/error.h"
#include "parameter_server/served_models.h"
#include "transport/socket.h"

namespace lockstep::grpc_service {
namespace {

using parameter_server::Services;
using Stream = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr double kLongestWait = 600;  // seconds that a caller may ask for
constexpr int kMostThreads = 512;     // of calls at once
constexpr std::chrono::seconds kToEndCalls(1);

// Memory of several parts, one after the other.
struct Parts {
  explicit Parts(const std::vector<std::size_t>& sizes) {
    std::size_t total = 0;
    for (const auto size : sizes) total += size;
    memory = std::shared_ptr<std::byte[]>(new std::byte[total]);
    auto* at = memory.get();
    for (const auto size : sizes) {
      parts.emplace_back(at, size);
      at += size;
    }
  }
  std::shared_ptr<std::byte[]> memory;
  std::vector<std::span<std::byte>> parts;
};

// One call. Throws what the services throw.
class Answer {
 public:
  Answer(const Services& services, Stream& stream, const Request& request)
      : services_(services),
        stream_(stream),
        request_(request),
        deadline_(Deadline::after(std::chrono::duration<double>(std::clamp(request.seconds(), 0.0, kLongestWait)))) {}

  void give() {
    switch (request_.kind_case()) {
      case Request::kOpen: return open(request_.open());
      case Request::kPush: return push(request_.push());
      case Request::kPull: return pull(request_.pull());
      case Request::kWrite: return write(request_.write());
      case Request::kNext: return next(request_.next());
      case Request::kOutcome: return outcome(request_.outcome());
      case Request::kStay: return stay(request_.stay());
      default: throw InvalidArgument("a request of a kind that this version does not know");
    }
  }

 private:
  parameter_server::ServedModels& models() const {
    if (services_.models) return *services_.models;
    throw InvalidArgument("this process is no parameter server");
  }
  parameter_server::ChiefService& chief() const {
    if (services_.chief) return *services_.chief;
    throw InvalidArgument("this process is not the chief");
  }

  // How long a caller is kept waiting before it is told to ask again.
  static Deadline poll() { return Deadline::after(std::chrono::seconds(2)); }

  bool read(grpc::ByteBuffer& frame) const { return stream_.Read(&frame); }
  void reply(const Reply& reply = {}) const { stream_.Write(frame_of(reply)); }

  Parts read_parts(const std::vector<std::size_t>& sizes) const {
    Parts received(sizes);
    read_bulk(received.parts, [this](grpc::ByteBuffer& frame) { return read(frame); });
    return received;
  }

  void open(const Open& open) const {
    models().open(open.model(), open.user(), open.description(), deadline_);
    reply();
  }

  void push(const Push& push) const {
    auto sizes = models().shard_bytes(push.model());
    if (push.present().size() != sizes.size()) {
      throw InvalidArgument(text("the push of step ", push.task().step(), " has gradients of ", push.present().size(),
                                 " shards; this server has ", sizes.size()));
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (push.present()[i] == 0) sizes[i] = 0;
    }
    const auto received = read_parts(sizes);
    parameter_server::Push given{.task = {push.task().step(), push.task().part()}, .weight = push.weight()};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      given.gradients.push_back(push.present()[i] == 0 ? nullptr : received.parts[i].data());
    }
    given.memory = received.memory;
    if (push.has_learning_rate()) given.learning_rate = push.learning_rate();
    models().push(push.model(), std::move(given));
    reply();
  }

  void pull(const Pull& pull) const {
    const Parts values(models().shard_bytes(pull.model()));
    std::vector<std::byte*> shards;
    Bulk bulk{.parts = {}, .owner = values.memory};
    for (const auto& part : values.parts) {
      shards.push_back(part.data());
      bulk.parts.emplace_back(part);
    }
    models().pull(pull.model(), shards, deadline_);
    reply();
    write_bulk(bulk, [this](const grpc::ByteBuffer& frame) { return stream_.Write(frame); });
  }

  void write(const Write& write) const {
    const auto received = read_parts(models().shard_bytes(write.model()));
    std::vector<const std::byte*> shards;
    for (const auto& part : received.parts) shards.push_back(part.data());
    models().write(write.model(), shards);
    reply();
  }

  void next(const Next& next) const {
    std::optional<parameter_server::Report> report;
    if (next.has_report()) {
      const auto& said = next.report();
      if (said.kind() < 0 || said.kind() > 2) throw InvalidArgument(text("a report of kind ", said.kind()));
      report = parameter_server::Report{.kind = static_cast<parameter_server::Report::Kind>(said.kind()),
                                        .task = {said.task().step(), said.task().part()},
                                        .results = {said.results().begin(), said.results().end()},
                                        .error = said.error()};
    }
    const auto given = chief().next(next.call(), next.worker(), report, poll());
    Reply answer;
    auto& assignment = *answer.mutable_assignment();
    assignment.set_kind(static_cast<int>(given.kind));
    assignment.mutable_task()->set_step(given.task.step);
    assignment.mutable_task()->set_part(given.task.part);
    assignment.set_epoch(given.epoch);
    assignment.set_index(given.index);
    if (given.learning_rate) assignment.set_learning_rate(*given.learning_rate);
    reply(answer);
  }

  void outcome(const Outcome& outcome) const {
    const auto result = chief().outcome(outcome.call(), poll());
    Reply answer;
    if (result) answer.set_outcome(*result);
    reply(answer);
  }

  // Until the other process ends, or does not answer.
  void stay(const Stay& stay) const {
    const parameter_server::Process process{stay.process(), stay.worker()};
    chief().join(process);
    reply();
    grpc::ByteBuffer frame;
    while (read(frame)) {
    }
    chief().leave(process);
  }

  const Services& services_;
  Stream& stream_;
  const Request& request_;
  const Deadline deadline_;
};

class Service : public grpc::Service {
 public:
  Service(Access access, Services services) : access_(std::move(access)), services_(std::move(services)) {
    using Handler = grpc::internal::BidiStreamingHandler<Service, grpc::ByteBuffer, grpc::ByteBuffer>;
    const auto answer = [](Service* self, grpc::ServerContext*, Stream* stream) { return self->answer(*stream); };
    AddMethod(new grpc::internal::RpcServiceMethod(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
                                                   new Handler(answer, this)));
  }

 private:
  grpc::Status answer(Stream& stream) const {
    try {
      Request request;
      grpc::ByteBuffer frame;
      if (!stream.Read(&frame) || !parse(frame, request))
        throw InvalidArgument("the call does not begin with a request");
      if (!is_proof(access_, request.nonce(), request.proof())) {
        throw ClusterError("the caller does not have the token of this job");
      }
      Answer(services_, stream, request).give();
      return grpc::Status::OK;
    } catch (...) {
      return status_of_exception();
    }
  }

  const Access access_;
  const Services services_;
};

class GrpcEndpoint final : public parameter_server::Endpoint {
 public:
  GrpcEndpoint(const std::string& address, const Access& access, const Services& services)
      : service_(access, services) {
    grpc::ServerBuilder builder;
    int port = 0;
    grpc::ResourceQuota quota;
    quota.SetMaxThreads(kMostThreads);
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(static_cast<int>(kLongestMessage));
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (!server_ || port == 0) throw ClusterError(text("cannot answer calls at ", address, ": is the port in use?"));
    address_ = transport::with_port(address.substr(0, address.rfind(':')), port);
  }

  ~GrpcEndpoint() override {
    server_->Shutdown(std::chrono::system_clock::now() + kToEndCalls);
    server_->Wait();
  }

  std::string address() const override { return address_; }

 private:
  Service service_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

std::unique_ptr<parameter_server::Endpoint> serve(const std::string& address, const Access& access,
                                                  const Services& services) {
  const auto host = address.substr(0, address.rfind(':'));
  if (!transport::is_loopback(host) && !access.trusted_network) {
    throw ClusterError(text("parameter servers would answer at ", address, " without encryption: ",
                            "other hosts can be reached in a trusted network alone (--trusted-network, or ",
                            kTrustedNetworkVariable, "=1)"));
  }
  return std::make_unique<GrpcEndpoint>(address, access, services);
}

}  // namespace lockstep::grpc_service
