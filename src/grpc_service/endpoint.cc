#include "grpc_service/endpoint.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/rpc_service_method.h>
#include <grpcpp/support/method_handler.h>

#include <algorithm>

#include "base/text.h"
#include "grpc_service/blocks.h"
#include "grpc_service/frames.h"
#include "grpc_service/messages.pb.h"
#include "grpc_service/proof.h"
#include "grpc_service/receive_buffers.h"
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
  Parts(const std::vector<std::size_t>& sizes, ReceiveBuffers& buffers) {
    std::size_t total = 0;
    for (const auto size : sizes) total += size;
    memory = buffers.take(total);
    auto* at = memory.get();
    for (const auto size : sizes) {
      parts.emplace_back(at, size);
      at += size;
    }
  }
  std::shared_ptr<std::byte[]> memory;
  std::vector<std::span<std::byte>> parts;
};

// What calls share.
struct State {
  Blocks blocks;
  ReceiveBuffers buffers;
};

// One call. Throws what the services throw.
class Answer {
 public:
  Answer(const Services& services, State& state, Stream& stream, const Request& request)
      : services_(services),
        state_(state),
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
      case Request::kStart: return start(request_.start());
      case Request::kShare: return share(request_.share());
      case Request::kCut: return cut(request_.cut());
      case Request::kSave: return save(request_.save());
      case Request::kRestore: return restore(request_.restore());
      default: throw InvalidArgument("a request of a kind that this version does not know");
    }
  }

 private:
  parameter_server::ServedModels& models() const {
    if (services_.models) return *services_.models;
    throw InvalidArgument("this process is no parameter server");
  }
  // Waits for a model that this server has not made yet.
  parameter_server::ServedModels& models_with(std::int64_t model) const {
    models().wait_for(model, deadline_);
    return models();
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
    Parts received(sizes, state_.buffers);
    read_bulk(received.parts, [this](grpc::ByteBuffer& frame) { return read(frame); });
    return received;
  }

  void open(const Open& open) const {
    models().open(open.model(), open.user(), open.description(), deadline_);
    reply();
  }

  void push(const Push& push) const {
    const auto shards = models_with(push.model()).shard_bytes(push.model());
    auto sizes = shards;  // of what is sent
    if (push.present().size() != sizes.size()) {
      throw InvalidArgument(text("the push of step ", push.task().step(), " has gradients of ", push.present().size(),
                                 " shards; this server has ", sizes.size()));
    }
    const auto in_block = shared(push.has_shared(), push.shared(), shards);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (push.present()[i] == 0 || in_block.at[i] != nullptr) sizes[i] = 0;
    }
    const auto received = read_parts(sizes);
    parameter_server::Push given{.task = {push.task().step(), push.task().part()}, .weight = push.weight()};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::byte* const gradient = in_block.at[i] != nullptr ? in_block.at[i] : received.parts[i].data();
      given.gradients.push_back(push.present()[i] == 0 ? nullptr : gradient);
    }
    if (in_block.block == nullptr) given.memory = received.memory;  // else the caller's, which must be copied to keep
    if (push.has_learning_rate()) given.learning_rate = push.learning_rate();
    given.chief = push.chief();
    given.finished = push.finished();
    models().push(push.model(), std::move(given));
    reply();
  }

  void pull(const Pull& pull) const {
    const auto& served = models_with(pull.model());
    if (pull.has_shared()) {
      const auto in_block = shared(true, pull.shared(), served.shard_bytes(pull.model()));
      served.pull(pull.model(), in_block.at, deadline_);
      return reply();
    }
    const Parts values(served.shard_bytes(pull.model()), state_.buffers);
    std::vector<std::byte*> shards;
    Bulk bulk{.parts = {}, .owner = values.memory};
    for (const auto& part : values.parts) {
      shards.push_back(part.data());
      bulk.parts.emplace_back(part);
    }
    served.pull(pull.model(), shards, deadline_);
    reply();
    write_bulk(bulk, [this](const grpc::ByteBuffer& frame) { return stream_.Write(frame); });
  }

  void write(const Write& write) const {
    const auto received = read_parts(models_with(write.model()).shard_bytes(write.model()));
    std::vector<const std::byte*> shards;
    for (const auto& part : received.parts) shards.push_back(part.data());
    models().write(write.model(), shards);
    reply();
  }

  void reply_done(bool done) const {
    Reply answer;
    answer.set_done(done);
    reply(answer);
  }

  void cut(const Cut& cut) const { reply_done(models_with(cut.model()).cut(cut.model(), cut.end())); }

  void save(const Save& save) const {
    reply_done(models_with(save.model()).save(save.model(), save.end(), save.file()));
  }

  void restore(const Restore& restore) const {
    models_with(restore.model()).restore(restore.model(), restore.checkpoint(), restore.change(), restore.chief());
    reply();
  }

  void next(const Next& next) const {
    std::optional<parameter_server::Report> report;
    if (next.has_report()) {
      const auto& said = next.report();
      if (said.kind() < 0 || said.kind() > 2) throw InvalidArgument(text("a report of kind ", said.kind()));
      report = parameter_server::Report{.kind = static_cast<parameter_server::Report::Kind>(said.kind()),
                                        .task = {said.task().step(), said.task().part()},
                                        .chief = said.chief(),
                                        .results = {said.results().begin(), said.results().end()},
                                        .error = said.error(),
                                        .leaves = said.leaves()};
      for (const auto& buffer : said.buffers()) report->buffers[buffer.number()] = buffer.values();
      if (said.output_bytes() > parameter_server::kLongestOutput) {
        throw InvalidArgument(
            text("a step returned ", said.output_bytes(), " bytes; the most is ", parameter_server::kLongestOutput));
      }
      report->output.resize(said.output_bytes());
      const auto output = std::as_writable_bytes(std::span(report->output));
      read_bulk({&output, 1}, [this](grpc::ByteBuffer& frame) { return read(frame); });
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
    assignment.set_chief(given.chief);
    assignment.set_finished(given.finished);
    assignment.set_function(given.function);
    reply_text(std::move(answer), given.arguments);
  }

  void outcome(const Outcome& outcome) const { reply_text(chief().outcome(outcome.call(), poll())); }

  void start(const Start& start) const {
    reply_text(chief().start(start.call(), start.worker(), start.plan(), poll()));
  }

  void reply_text(const std::optional<std::string>& words) const {
    if (!words) return reply();
    reply_text({}, *words);
  }

  void reply_text(Reply answer, const std::string& words) const {
    answer.set_text_bytes(words.size());
    reply(answer);
    if (words.empty()) return;
    const auto kept = std::make_shared<const std::string>(words);
    write_bulk({.parts = {std::as_bytes(std::span(*kept))}, .owner = kept},
               [this](const grpc::ByteBuffer& frame) { return stream_.Write(frame); });
  }

  std::int64_t named_model() const { return request_.has_push() ? request_.push().model() : request_.pull().model(); }

  // Shards in a block of the caller's.
  struct InBlock {
    std::shared_ptr<parameter_server::SharedBlock> block;  // null: there is none
    std::vector<std::byte*> at;                            // [shard], null where it is not there
  };
  InBlock shared(bool has, const Shards& named, const std::vector<std::size_t>& shards) const {
    InBlock result{.block = nullptr, .at = std::vector<std::byte*>(shards.size())};
    if (!has) return result;
    result.block = state_.blocks.find(named.block());
    if (result.block == nullptr) throw UnknownBlock("this server has no such shared block");
    if (static_cast<std::size_t>(named.offsets_size()) != shards.size()) {
      throw InvalidArgument(text(named.offsets_size(), " shards are shared; this server has ", shards.size()));
    }
    const auto sizes = models().element_sizes(named_model());
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto offset = named.offsets(static_cast<int>(i));
      if (offset < 0 && request_.has_push()) continue;
      result.at[i] = result.block->at(offset, shards[i]);
      if (result.at[i] == nullptr || offset % static_cast<std::int64_t>(sizes[i]) != 0) {
        throw InvalidArgument(text("a shard of ", shards[i], " bytes is not at ", offset, " of its shared block"));
      }
    }
    return result;
  }

  void share(const Share& share) const {
    const auto block = parameter_server::SharedBlock::open(
        {.process = share.process(), .descriptor = share.file(), .bytes = share.bytes(), .nonce = share.nonce()});
    if (block == nullptr) return reply();
    const auto number = state_.blocks.add(block);
    Reply answer;
    answer.set_block(number);
    reply(answer);
    wait_for_end();
    state_.blocks.remove(number);
  }

  void wait_for_end() const {
    grpc::ByteBuffer frame;
    while (read(frame)) {
    }
  }

  // Until the other process ends, or does not answer.
  void stay(const Stay& stay) const {
    const parameter_server::Process process{stay.process(), stay.worker()};
    chief().join(process);
    reply();
    wait_for_end();
    chief().leave(process);
  }

  const Services& services_;
  State& state_;
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
  grpc::Status answer(Stream& stream) {
    try {
      Request request;
      grpc::ByteBuffer frame;
      if (!stream.Read(&frame) || !parse(frame, request))
        throw InvalidArgument("the call does not begin with a request");
      if (!is_proof(access_, request.nonce(), request.proof())) {
        throw ClusterError("the caller does not have the token of this job");
      }
      Answer(services_, state_, stream, request).give();
      return grpc::Status::OK;
    } catch (...) {
      return status_of_exception();
    }
  }

  const Access access_;
  const Services services_;
  State state_;
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
