#include "parameter_server/grpc_service/engine.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/rpc_service_method.h>
#include <grpcpp/server_posix.h>
#include <grpcpp/support/method_handler.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <optional>
#include <thread>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/credentials.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/grpc_service/unproven_connections.h"
#include "transport/acceptor.h"
#include "transport/socket.h"

namespace lockstep::grpc_service {
namespace {

using parameter_server::Services;
using Stream = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr int kMostThreads = 512;  // of calls at once
constexpr std::chrono::seconds kToEndCalls(1);
constexpr int kToProveByTls = 5'000;  // milliseconds

class Service : public grpc::Service {
 public:
  // `unproven`: the server's connections with TLS.
  Service(Access access, Services services, UnprovenConnections& unproven)
      : access_(std::move(access)), services_(std::move(services)), unproven_(unproven) {
    using Handler = grpc::internal::BidiStreamingHandler<Service, grpc::ByteBuffer, grpc::ByteBuffer>;
    const auto answer = [](Service* self, grpc::ServerContext* context, Stream* stream) {
      return self->answer(*context, *stream);
    };
    AddMethod(new grpc::internal::RpcServiceMethod(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
                                                   new Handler(answer, this)));
  }

 private:
  grpc::Status answer(const grpc::ServerContext& context, Stream& stream) {
    try {
      check_identity(context, access_);
      if (!unproven_.empty()) unproven_.prove(context.peer());
      Request request;
      grpc::ByteBuffer frame;
      if (!stream.Read(&frame) || !parse(frame, request))
        throw InvalidArgument("the call does not begin with a request");
      const CallStream rest{.read = [&](grpc::ByteBuffer& into) { return stream.Read(&into); },
                            .write = [&](const grpc::ByteBuffer& from) { return stream.Write(from); },
                            .cancelled = [&] { return context.IsCancelled(); }};
      grpc_service::answer(services_, state_, rest, request);
      return grpc::Status::OK;
    } catch (...) {
      return status_of_exception();
    }
  }

  const Access access_;
  const Services services_;
  UnprovenConnections& unproven_;
  AnswerState state_;
};

// Waits for connections in a thread of its own, by accept(listener, stop), which returns once `stop` can be read.
class Door {
 public:
  template <class Accept>
  Door(FileDescriptor listener, Accept accept)
      : listener_(std::move(listener)),
        stop_(eventfd(0, EFD_CLOEXEC)),
        thread_([this, accept = std::move(accept)] { accept(listener_, stop_); }) {}
  ~Door() { eventfd_write(stop_.get(), 1); }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

 private:
  const FileDescriptor listener_, stop_;
  std::jthread thread_;
};

// Gives the server those connections whose other end has proved that it belongs to the job. So gRPC neither reads a
// stranger's bytes nor keeps a descriptor for a stranger.
void accept_proved(const FileDescriptor& listener, const FileDescriptor& stop, const Access& access,
                   grpc::Server& server) {
  transport::Acceptor acceptor(listener, access, calls_greeting(), [](const transport::Greeting&) { return ""; });
  while (true) {
    std::vector<pollfd> polls{{stop.get(), POLLIN, 0}};
    acceptor.watch(polls);
    poll(polls.data(), polls.size(), acceptor.busy() ? transport::Acceptor::kLongestPoll : -1);
    if (polls[0].revents != 0) return;
    for (auto& accepted : acceptor.advance(std::span(polls).subspan(1))) {
      grpc::AddInsecureChannelFromFd(&server, accepted.socket.release());
    }
  }
}

// With TLS gRPC makes the handshakes, of a bounded number of connections at a time.
using ToServer = grpc::experimental::ExternalConnectionAcceptor;

// False where there is no room for another connection, or this process can have no more descriptors.
bool take_one(const FileDescriptor& listener, ToServer& to_server, UnprovenConnections& unproven) {
  if (!unproven.make_room()) return false;
  FileDescriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.open()) return errno != EMFILE && errno != ENFILE;
  transport::send_at_once(socket);
  unproven.add(socket);
  ToServer::NewConnectionParameters connection;
  connection.listener_fd = listener.get();
  connection.fd = socket.release();
  to_server.HandleNewConnection(&connection);
  return true;
}

void accept_with_tls(const FileDescriptor& listener, const FileDescriptor& stop, ToServer& to_server,
                     UnprovenConnections& unproven) {
  constexpr auto kLongestPoll = transport::Acceptor::kLongestPoll;
  while (true) {
    pollfd polls[] = {{stop.get(), POLLIN, 0}, {listener.get(), POLLIN, 0}};
    poll(polls, 2, unproven.empty() ? -1 : kLongestPoll);
    if (polls[0].revents != 0) return;
    unproven.forget();
    const bool one_waits = polls[1].revents != 0;
    if (one_waits && !take_one(listener, to_server, unproven)) poll(polls, 1, kLongestPoll);  // until there is room
  }
}

class GrpcEndpoint final : public parameter_server::Endpoint {
 public:
  GrpcEndpoint(const std::string& address, const Access& access, const Services& services)
      : unproven_(transport::most_that_prove()), service_(access, services, unproven_) {
    grpc::ServerBuilder builder;
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
    builder.RegisterService(&service_);
    start(builder, address, access);
  }

  ~GrpcEndpoint() override {
    door_.reset();
    server_->Shutdown(std::chrono::system_clock::now() + kToEndCalls);
    server_->Wait();
  }

  std::string address() const override { return address_; }

 private:
  void start(grpc::ServerBuilder& builder, const std::string& address, const Access& access) {
    auto listener = transport::listen_at(address, access);
    address_ = told_address(transport::local_address(listener), access);
    const bool uses_tls = !access.certificates.empty();
    std::shared_ptr<ToServer> to_server;
    if (uses_tls) {
      builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kToProveByTls);
      using Type = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
      to_server = builder.experimental().AddExternalConnectionAcceptor(Type::FROM_FD, server_credentials(access));
    }
    server_ = builder.BuildAndStart();
    if (!server_) throw ClusterError(text("cannot answer calls at ", address));
    door_.emplace(std::move(listener), [this, access, to_server](const auto& at, const auto& stop) {
      to_server ? accept_with_tls(at, stop, *to_server, unproven_) : accept_proved(at, stop, access, *server_);
    });
  }

  UnprovenConnections unproven_;  // with TLS
  Service service_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
  std::optional<Door> door_;
};

}  // namespace

std::unique_ptr<parameter_server::Endpoint> GrpcEngine::serve(const std::string& address, const Access& access,
                                                              const Services& services) const {
  const auto host = address.substr(0, address.rfind(':'));
  if (!transport::is_loopback(host) && access.certificates.empty() && !access.trusted_network) {
    throw ClusterError(text("parameter servers would answer at ", address, " without encryption: make certificates ",
                            "for the job (lockstep certs) and name their folder (lockstep run --certs, or ",
                            kCertificatesVariable, "), or say that the network is trusted (--trusted-network, or ",
                            kTrustedNetworkVariable, "=1)"));
  }
  return std::make_unique<GrpcEndpoint>(address, access, services);
}

}  // namespace lockstep::grpc_service
