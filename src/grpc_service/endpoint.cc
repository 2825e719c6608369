#include "grpc_service/endpoint.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/rpc_service_method.h>
#include <grpcpp/support/method_handler.h>

#include "base/text.h"
#include "grpc_service/answer.h"
#include "grpc_service/credentials.h"
#include "grpc_service/frames.h"
#include "grpc_service/identity.h"
#include "grpc_service/status.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::grpc_service {
namespace {

using parameter_server::Services;
using Stream = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr int kMostThreads = 512;  // of calls at once
constexpr std::chrono::seconds kToEndCalls(1);

class GrpcStream final : public CallStream {
 public:
  GrpcStream(const grpc::ServerContext& context, Stream& stream) : context_(context), stream_(stream) {}
  bool read(grpc::ByteBuffer& frame) override { return stream_.Read(&frame); }
  bool write(const grpc::ByteBuffer& frame) override { return stream_.Write(frame); }
  bool cancelled() const override { return context_.IsCancelled(); }

 private:
  const grpc::ServerContext& context_;
  Stream& stream_;
};

class Service : public grpc::Service {
 public:
  Service(Access access, Services services) : access_(std::move(access)), services_(std::move(services)) {
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
      Request request;
      grpc::ByteBuffer frame;
      if (!stream.Read(&frame) || !parse(frame, request))
        throw InvalidArgument("the call does not begin with a request");
      GrpcStream rest(context, stream);
      grpc_service::answer(services_, state_, rest, request);
      return grpc::Status::OK;
    } catch (...) {
      return status_of_exception();
    }
  }

  const Access access_;
  const Services services_;
  AnswerState state_;
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
    builder.AddListeningPort(address, server_credentials(access), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (!server_ || port == 0) throw ClusterError(text("cannot answer calls at ", address, ": is the port in use?"));
    address_ = told_address(transport::with_port(address.substr(0, address.rfind(':')), port), access);
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
  if (!transport::is_loopback(host) && access.certificates.empty() && !access.trusted_network) {
    throw ClusterError(text("parameter servers would answer at ", address, " without encryption: make certificates ",
                            "for the job (lockstep certs) and name their folder (lockstep run --certs, or ",
                            kCertificatesVariable, "), or say that the network is trusted (--trusted-network, or ",
                            kTrustedNetworkVariable, "=1)"));
  }
  return std::make_unique<GrpcEndpoint>(address, access, services);
}

}  // namespace lockstep::grpc_service
