// Calls with TLS, by certificates that `lockstep certs` makes.
#include "parameter_server/grpc_service/credentials.h"

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/caller.h"
#include "parameter_server/grpc_service/engine.h"
#include "parameter_server/served_models.h"
#include "transport/acceptor.h"
#include "transport/socket.h"

namespace lockstep::grpc_service {
namespace {

using namespace parameter_server;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

std::string read(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::ostringstream contents;
  contents << in.rdbuf();
  return contents.str();
}

class Tls : public testing::Test {
 protected:
  Tls() {
    const std::vector<VariableSpec> variables{{"v", DType::float32, {kCount}}};
    models_->add(0, "a model",
                 std::make_shared<ShardStore>(ModelSpec{variables}, place_shards(variables, {}, 1), ServerNumber(),
                                              SGD({.learning_rate = 1}), UpdateMode()));
  }

  // An access with new certificates.
  static Access certified(const std::string& name) {
    const auto folder = fresh_folder("credentials", name);
    EXPECT_EQ(std::system(text(LOCKSTEP_CLI, " certs ", folder.string()).c_str()), 0);
    return {.token = std::string(32, 't'), .certificates = folder.string()};
  }

  static std::shared_ptr<ServerConnection> connect(const Endpoint& endpoint, const Access& access) {
    return GrpcEngine().connect_server(
        {.server = "ps 0",
         .user = "worker 0",
         .model = 0,
         .shard_bytes = {kCount * sizeof(float)},
         .reconnect_seconds = 1},
        [address = endpoint.address()](Deadline) { return address; }, access);
  }

  static constexpr std::size_t kCount = 3'000'000;  // several messages
  const std::shared_ptr<ServedModels> models_ = std::make_shared<ServedModels>(1);
};

TEST_F(Tls, CallsOfTheJobArriveAndOthersAreRefused) {
  const auto ours = certified("ours"), others = certified("others");
  const auto endpoint = GrpcEngine().serve("127.0.0.1:0", ours, {.models = models_});
  const auto open_as = [&](const Access& access) { connect(*endpoint, access)->open("a model", soon()); };
  expect_says(message_of<ClusterError>([&] { open_as(others); }), "ps 0 has no certificate of this job");
  expect_says(message_of<ClusterError>([&] { open_as({.token = ours.token}); }),
              "ps 0 uses TLS and this process does not");
  auto without_token = ours;
  without_token.token = std::string(32, 'u');
  expect_says(message_of<ClusterError>([&] { open_as(without_token); }), "token of this job");

  const auto server = connect(*endpoint, ours);
  const std::vector<float> values(kCount, 5), gradient(kCount, 2);
  const auto* const sent = reinterpret_cast<const std::byte*>(values.data());
  server->write({&sent, 1}, soon());
  server->push({.task = {0}, .weight = 1, .gradients = {reinterpret_cast<const std::byte*>(gradient.data())}}, soon());
  std::vector<float> pulled(kCount);
  auto* const at = reinterpret_cast<std::byte*>(pulled.data());
  std::vector<std::int64_t> versions;
  server->pull({&at, 1}, versions, soon());
  EXPECT_EQ(pulled, std::vector<float>(kCount, 3));
}

TEST_F(Tls, AServerWithoutIsNotCalled) {
  const auto ours = certified("ours");
  const auto endpoint = GrpcEngine().serve("127.0.0.1:0", {.token = ours.token}, {.models = models_});
  expect_says(message_of<ClusterError>([&] { connect(*endpoint, ours)->open("a model", soon()); }),
              "ps 0 does not use TLS, and this process does");
}

// A caller that trusts the server, and does not show the job's certificate.
TEST_F(Tls, TheServerWantsACertificateOfItsJob) {
  const auto ours = certified("ours"), others = certified("others");
  const auto endpoint = GrpcEngine().serve("127.0.0.1:0", ours, {.models = models_});
  const auto connects = [&](const std::string& certificates) {
    grpc::SslCredentialsOptions options{.pem_root_certs = read(ours.certificates + "/ca.pem")};
    if (!certificates.empty()) {
      options.pem_private_key = read(certificates + "/key.pem");
      options.pem_cert_chain = read(certificates + "/cert.pem");
    }
    grpc::ChannelArguments arguments;
    arguments.SetSslTargetNameOverride(kTlsName);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(called_address(endpoint->address(), ours, "ps 0"),
                                                   grpc::SslCredentials(options), arguments);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    const grpc::internal::RpcMethod method(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING, channel);
    using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;
    const std::unique_ptr<ClientStream> stream(Factory::Create(channel.get(), method, &context));
    stream->WritesDone();
    grpc::ByteBuffer frame;
    while (stream->Read(&frame)) {
    }
    return stream->Finish().error_code() == grpc::StatusCode::UNAUTHENTICATED;  // it wants a token too
  };
  EXPECT_TRUE(connects(ours.certificates));
  EXPECT_FALSE(connects(others.certificates));
  EXPECT_FALSE(connects(""));
}

bool is_ended(const FileDescriptor& socket) {
  char byte = 0;
  return recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
}

// A process of the job may be slow, and only needs its place where another connection waits for that.
TEST_F(Tls, AFullServerEndsNoneWhereNoneWaits) {
  const auto ours = certified("ours");
  const auto endpoint = GrpcEngine().serve("127.0.0.1:0", ours, {.models = models_});
  const auto address = called_address(endpoint->address(), ours, "ps 0");
  std::vector<FileDescriptor> silent;
  const auto come = [&] {
    std::string problem;
    silent.push_back(transport::connect_once(address, soon(), problem));
    ASSERT_TRUE(silent.back().open()) << problem;
  };
  while (silent.size() < transport::most_that_prove()) come();
  for (const auto a_while = Deadline::after(std::chrono::milliseconds(400)); !a_while.passed(); usleep(1000)) {
  }
  EXPECT_TRUE(std::none_of(silent.begin(), silent.end(), is_ended));
  come();
  for (const auto deadline = soon(); !is_ended(silent[0]) && !deadline.passed(); usleep(1000)) {
  }
  EXPECT_EQ(std::count_if(silent.begin(), silent.end(), is_ended), 1);
}

// As many strangers as may be without proof at a time begin the TLS handshake. They do not use up the server's
// descriptors, and a process of the job reaches the server beside them. A connection that has made a call stays.
TEST_F(Tls, StrangersHoldABoundedNumberOfConnections) {
  struct Served {
    std::unique_ptr<Endpoint> endpoint;
    std::shared_ptr<grpc::Channel> channel;
    std::vector<FileDescriptor> strangers;
  };
  const auto ours = certified("ours");
  const auto most = transport::most_that_prove();
  std::string problem;
  std::vector<Served> all;
  for (const std::string host : {"127.0.0.1", "[::1]"}) {
    auto& [endpoint, channel, strangers] = all.emplace_back();
    endpoint = GrpcEngine().serve(host + ":0", ours, {.models = models_});
    const auto address = called_address(endpoint->address(), ours, "ps 0");
    channel = open_channel(address, ours, soon(), problem);
    grpc::ClientContext context;
    Identity(ours).add_to(context);
    const grpc::internal::RpcMethod method(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING, channel);
    using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;
    const std::unique_ptr<ClientStream> stream(Factory::Create(channel.get(), method, &context));
    stream->WritesDone();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);  // it had no request
    while (strangers.size() < most + 100) {
      strangers.push_back(transport::connect_once(address, soon(), problem));
      ASSERT_TRUE(strangers.back().open()) << problem;
      ::send(strangers.back().get(), "\x16", 1, 0);  // of a handshake
    }
  }
  for (const auto& [endpoint, channel, strangers] : all) {
    // The server's ends, of which the first make room for the last.
    for (const auto deadline = soon(); !is_ended(strangers[99]) && !deadline.passed();) usleep(1000);
    EXPECT_TRUE(is_ended(strangers[99]));
    EXPECT_FALSE(is_ended(strangers.back()));
    connect(*endpoint, ours)->open("a model", soon());
    EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  }
}

TEST_F(Tls, FilesThatCannotBeUsedAreNamed) {
  auto ours = certified("ours");
  EXPECT_NE(std::system(text(LOCKSTEP_CLI, " certs ", ours.certificates, " 2>/dev/null").c_str()), 0);  // not replaced
  const auto says = [&](const std::string& part) {
    expect_says(message_of<ClusterError>([&] { GrpcEngine().serve("127.0.0.1:0", ours, {.models = models_}); }), part);
  };
  std::filesystem::permissions(ours.certificates + "/key.pem", std::filesystem::perms(0644));
  says("others may read");
  std::filesystem::permissions(ours.certificates + "/key.pem", std::filesystem::perms(0600));
  std::filesystem::copy_file(certified("others").certificates + "/cert.pem", ours.certificates + "/cert.pem",
                             std::filesystem::copy_options::overwrite_existing);
  says("does not belong to cert.pem");
  std::ofstream(ours.certificates + "/cert.pem") << "no certificate";
  says("cert.pem is not a PEM file of that kind");
  std::filesystem::remove(ours.certificates + "/ca.pem");
  says("ca.pem: No such file or directory; `lockstep certs` makes the folder");
}

}  // namespace
}  // namespace lockstep::grpc_service
