// Calls over loopback: what arrives, and who is refused.
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "parameter_server/coordinator.h"
#include "parameter_server/grpc_service/credentials.h"
#include "parameter_server/grpc_service/engine.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/grpc_service/messages.pb.h"
#include "parameter_server/served_models.h"
#include "transport/socket.h"

namespace lockstep::grpc_service {
namespace {

using namespace parameter_server;

const Access kAccess{.token = std::string(32, 't')};
Deadline in_time() { return Deadline::after(std::chrono::seconds(10)); }

FindAddress at(const Endpoint& endpoint) {
  return [address = endpoint.address()](Deadline) { return address; };
}

std::vector<float> counting(std::size_t count, float first) {
  std::vector<float> values(count);
  for (auto& value : values) value = first++;
  return values;
}

const std::byte* bytes_of(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}
std::byte* bytes_of(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }

// A server with one model of two shards, the first larger than a message may be.
class GrpcService : public testing::Test {
 protected:
  static constexpr std::size_t kLarge = (kLongestMessage + 12) / sizeof(float), kSmall = 3;

  GrpcService() {
    const std::vector<VariableSpec> variables{{"large", DType::float32, {kLarge}}, {"small", DType::float32, {kSmall}}};
    const auto places = place_shards(variables, {}, 1);
    models_->add(0, "a model",
                 std::make_shared<ShardStore>(ModelSpec{variables}, places, ServerNumber(), SGD({.learning_rate = 1}),
                                              UpdateMode()));
  }

  std::shared_ptr<ServerConnection> connect(const Access& access = kAccess,
                                            std::vector<std::size_t> bytes = {kLarge * sizeof(float),
                                                                              kSmall * sizeof(float)},
                                            double reconnect_seconds = 60) {
    return GrpcEngine().connect_server({.server = "ps 0",
                                        .user = "worker 0",
                                        .model = 0,
                                        .shard_bytes = std::move(bytes),
                                        .reconnect_seconds = reconnect_seconds},
                                       at(*endpoint_), access);
  }

  // Returns the server's answer to bytes that no client of ours sends.
  grpc::Status answer_to(
      const std::vector<std::string>& messages, const std::function<void(grpc::ClientContext&)>& identify =
                                                    [](auto& context) { Identity(kAccess).add_to(context); }) {
    std::string problem;
    const auto channel = open_channel(endpoint_->address(), kAccess, in_time(), problem);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    identify(context);
    const grpc::internal::RpcMethod method(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING, channel);
    using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;
    const std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
        Factory::Create(channel.get(), method, &context));
    for (const auto& message : messages) {
      const grpc::Slice slice(message);
      stream->Write(grpc::ByteBuffer(&slice, 1));
    }
    stream->WritesDone();
    grpc::ByteBuffer frame;
    while (stream->Read(&frame)) {
    }
    return stream->Finish();
  }

  static std::string request(const std::function<void(Request&)>& fill) {
    Request request;
    request.set_seconds(1);
    fill(request);
    return request.SerializeAsString();
  }

  const std::shared_ptr<ServedModels> models_ = std::make_shared<ServedModels>(1);
  const std::shared_ptr<Coordinator> chief_ = std::make_shared<Coordinator>(2, 60);
  std::unique_ptr<Endpoint> endpoint_ = GrpcEngine().serve("127.0.0.1:0", kAccess, {models_, chief_});
};

TEST_F(GrpcService, ValuesAndGradientsArriveAsTheyWere) {
  const auto server = connect();
  server->open("a model", in_time());
  const auto large = counting(kLarge, 1), small = counting(kSmall, 100);
  server->write(std::vector{bytes_of(large), bytes_of(small)}, in_time());
  std::vector<float> got_large(kLarge), got_small(kSmall);
  std::vector<std::int64_t> versions;
  const auto pull = [&] { server->pull(std::vector{bytes_of(got_large), bytes_of(got_small)}, versions, in_time()); };
  pull();
  EXPECT_EQ(got_large, large);
  EXPECT_EQ(got_small, small);
  server->push({.task = {0}, .weight = 1, .gradients = {bytes_of(large), nullptr}}, in_time());
  server->push({.task = {1}, .weight = 2, .gradients = {nullptr, bytes_of(small)}, .learning_rate = 0.5}, in_time());
  server->push({.task = {1}, .weight = 2, .gradients = {nullptr, bytes_of(small)}}, in_time());  // again
  pull();
  EXPECT_EQ(got_large, std::vector<float>(kLarge, 0));
  EXPECT_EQ(got_small, (std::vector<float>{75, 75.75, 76.5}));

  // Only the shard that has changed since is sent.
  std::fill(got_large.begin(), got_large.end(), 7.F);
  server->push({.task = {2}, .weight = 1, .gradients = {nullptr, bytes_of(small)}, .learning_rate = 0.25}, in_time());
  pull();
  EXPECT_EQ(got_large, std::vector<float>(kLarge, 7));
  EXPECT_EQ(got_small, (std::vector<float>{50, 50.5, 51}));
  pull();
  versions.clear();
  pull();
  EXPECT_EQ(got_large, std::vector<float>(kLarge, 0));
}

TEST_F(GrpcService, WhatTheServerRefusesIsTheCallersError) {
  expect_says(message_of<InvalidArgument>([&] { connect()->open("another model", in_time()); }),
              "ps 0: the processes' models differ: the server has a model, and it is asked for another model");
  for (const auto& access : {Access{.token = std::string(32, 'u')}, Access{}}) {
    const auto says = message_of<DeadlineExceeded>([&] { connect(access, {}, 0.1)->open("a model", in_time()); });
    expect_says(says, "calling ps 0");
    expect_says(says, endpoint_->address() + ": it cannot prove that it belongs to this job: its token is another");
  }
  const auto values = counting(kSmall, 0);
  const auto short_shard = [&] {
    connect(kAccess, {12, 12})
        ->push({.task = {0}, .weight = 1, .gradients = {bytes_of(values), bytes_of(values)}}, in_time());
  };
  expect_says(message_of<InvalidArgument>(short_shard), "24 bytes were sent, and its shards have");
  const auto one_shard = [&] {
    connect(kAccess, {12})->push({.task = {0}, .weight = 1, .gradients = {bytes_of(values)}}, in_time());
  };
  expect_says(message_of<InvalidArgument>(one_shard), "gradients of 1 shards; this server has 2");
  connect()->open("a model", in_time());  // it goes on
}

TEST_F(GrpcService, BytesThatAreNoCallAreRefused) {
  const auto expect = [&](const std::vector<std::string>& messages, const std::string& part) {
    const auto status = answer_to(messages);
    EXPECT_FALSE(status.ok());
    expect_says(status.error_message(), part);
  };
  expect({}, "does not begin with a request");
  expect({"\xff\xff\xff"}, "does not begin with a request");
  expect({request([](Request&) {})}, "a kind that this version does not know");
  const auto pull = request([](Request& request) {
    request.mutable_pull();
    request.set_model(7);
  });
  expect({pull}, "waiting until the server makes model number 7");
  expect({request([](Request& request) { request.mutable_next()->set_worker(9); })}, "worker 9");
  const auto push = request([](Request& request) {
    request.mutable_push()->set_present(std::string("\0\1", 2));
    request.mutable_push()->set_weight(1);
  });
  expect({push, std::string(11, 'x')}, "11 bytes were sent, and its shards have 12");
  expect({push, std::string(13, 'x')}, "more than the 12 bytes");
  expect({std::string(kLongestMessage + 1, 'x')}, "larger than max");
  connect()->open("a model", in_time());  // it goes on
}

// The server refuses before it reads anything.
TEST_F(GrpcService, AnotherVersionIsRefused) {
  const auto status = answer_to({}, [](auto& context) { Identity(kAccess, "9.9.9").add_to(context); });
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  expect_says(status.error_message(), "the caller is of Lockstep \"9.9.9\" and this process of ");
}

// The first words of a client of gRPC, and more.
TEST_F(GrpcService, AConnectionThatProvesNothingIsNotAnswered) {
  const auto stranger = transport::connect_to(endpoint_->address(), in_time());
  std::string words = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  words.resize(300);
  transport::write_all(stranger, std::as_bytes(std::span(words)), in_time());
  EXPECT_THROW(transport::read_value<char>(stranger, in_time()), transport::ConnectionClosed);
  connect()->open("a model", in_time());  // it goes on
}

// More than may be in the handshake at a time. Half of them send part of an opening.
TEST_F(GrpcService, IdleConnectionsKeepNobodyOut) {
  std::vector<FileDescriptor> idle;
  for (int i = 0; i < 400; ++i) {
    idle.push_back(transport::connect_to(endpoint_->address(), in_time()));
    if (i % 2 == 0) transport::write_value(idle.back(), transport::fresh(calls_greeting()), in_time());
  }
  const auto begin = in_time();
  connect()->open("a model", in_time());
  EXPECT_LT(begin.waited().count(), 5);
}

// Another process has taken the port of a server that has ended, and the server was started again elsewhere. The
// stranger relays what it hears to the server.
TEST_F(GrpcService, ACallDoesNotStayWithAStranger) {
  const auto front = transport::listen_at("127.0.0.1:0", {});
  std::atomic<int> asked = 0;
  const auto address = [&](Deadline) { return asked++ == 0 ? transport::local_address(front) : endpoint_->address(); };
  const auto server = GrpcEngine().connect_server({.server = "ps 0", .user = "worker 0", .model = 0, .shard_bytes = {}},
                                                  address, kAccess);
  std::jthread stranger([&] {
    const auto caller = transport::accept_from(front, in_time());
    const auto to = transport::connect_to(endpoint_->address(), in_time());
    std::array<std::byte, sizeof(transport::Greeting) + sizeof(transport::SocketAddress) + sizeof(transport::Proof)>
        opening;
    transport::read_all(caller, opening, in_time());
    transport::write_all(to, opening, in_time());
    std::array<std::byte, sizeof(transport::Greeting) + sizeof(transport::Proof)> answer;
    transport::read_all(to, answer, in_time());
    transport::write_all(caller, answer, in_time());
  });
  server->open("a model", in_time());
  EXPECT_EQ(asked, 2);
}

TEST_F(GrpcService, TheChiefNoticesWhoHasGone) {
  auto worker = GrpcEngine().connect_chief({"worker 1", 1}, at(*endpoint_), kAccess);
  chief_->begin(0, 0, {});
  chief_->open(0, 0, 1);
  const auto given = worker->next(0, 1, {}, in_time());
  EXPECT_EQ(given.kind, parameter_server::Assignment::Kind::task);
  EXPECT_EQ(chief_->next(0, 0, {}, Deadline::after(std::chrono::seconds(0))).kind,
            parameter_server::Assignment::Kind::wait);
  worker.reset();
  auto other = GrpcEngine().connect_chief({"worker 0", 0}, at(*endpoint_), kAccess);
  auto assignment = other->next(0, 0, {}, in_time());
  while (assignment.kind == parameter_server::Assignment::Kind::wait) assignment = other->next(0, 0, {}, in_time());
  EXPECT_EQ(assignment, given);
  const parameter_server::Report report{
      .kind = parameter_server::Report::Kind::finished, .task = given.task, .chief = given.chief, .results = {1, 2.5}};
  std::jthread waits([&] {
    EXPECT_EQ(chief_->wait_for_step(in_time())->results, report.results);
    chief_->end(0, "outcome");
  });
  while (other->next(0, 0, report, in_time()).kind != parameter_server::Assignment::Kind::over) {
  }
  EXPECT_EQ(other->outcome(0, in_time()), "outcome");
}

TEST_F(GrpcService, AServersStateIsTransferred) {
  const auto server = connect();
  const std::vector<VariableSpec> variables{{"large", DType::float32, {kLarge}}, {"small", DType::float32, {kSmall}}};
  ShardStore received(ModelSpec{variables}, place_shards(variables, {}, 1), ServerNumber(), SGD(), UpdateMode());
  const auto fetch = [&](std::int64_t number) {
    return GrpcEngine().transfer({.server = "ps 0", .user = "ps 1", .shard_bytes = {}}, at(*endpoint_), kAccess, number,
                                 received, in_time());
  };
  EXPECT_FALSE(fetch(1));  // it has no values yet
  const auto large = counting(kLarge, 1), small = counting(kSmall, 100);
  server->write(std::vector{bytes_of(large), bytes_of(small)}, in_time());
  const parameter_server::Push push{.task = {0}, .weight = 1, .gradients = {bytes_of(large), bytes_of(small)}};
  EXPECT_EQ(server->push(push, in_time()), 0);
  EXPECT_TRUE(fetch(2));
  EXPECT_EQ(server->push(push, in_time()), 2);
  std::vector<float> values(kLarge, 1);
  received.shard(0).read(bytes_of(values));
  EXPECT_EQ(values, std::vector<float>(kLarge, 0));
  EXPECT_EQ(received.push(push), 2);
  EXPECT_EQ(received.shard(1).steps(), 1);
  expect_says(message_of<InvalidArgument>([&] { fetch(1); }), "comes after transfer 2");
}

TEST_F(GrpcService, SecondCopiesAreShardsOfTheirOwn) {
  const ServiceEngine::ModelOnServer second{
      .server = "ps 0", .user = "worker 0", .shard_bytes = {12}, .second_copies = true};
  const auto connect_second = [&] { return GrpcEngine().connect_server(second, at(*endpoint_), kAccess); };
  expect_says(message_of<InvalidArgument>([&] { connect_second()->open("other shards", in_time()); }),
              "this process has no second copies of shards");
  const auto copies = std::make_shared<ServedModels>(1);
  const std::vector<VariableSpec> variables{{"small", DType::float32, {3}}};
  copies->add(0, "other shards",
              std::make_shared<ShardStore>(ModelSpec{variables}, place_shards(variables, {}, 1), ServerNumber(), SGD(),
                                           UpdateMode()));
  endpoint_ = GrpcEngine().serve("127.0.0.1:0", kAccess, {models_, chief_, copies});
  const auto values = counting(3, 1);
  connect_second()->open("other shards", in_time());
  connect_second()->write(std::vector{bytes_of(values)}, in_time());
  std::vector<float> got(3);
  std::vector<std::int64_t> versions;
  connect_second()->pull(std::vector{bytes_of(got)}, versions, in_time());
  EXPECT_EQ(got, values);
  connect()->open("a model", in_time());
}

// 1.0625 has seven bits after the point, 1.00390625 has eight; float64 is sent as it is.
TEST_F(GrpcService, GradientsAreSentAsBFloat16WhereThatIsAsked) {
  const ModelSpec model{.variables = {{"a", DType::float32, {3}}, {"b", DType::float64, {1}}},
                        .tables = {{.name = "t", .rows = 9, .width = 2, .initializer = "zeros"}}};
  models_->add(1, "sixteen bits",
               std::make_shared<ShardStore>(model, place_shards(model.variables, {}, 1), ServerNumber(),
                                            SGD({.learning_rate = 1}), UpdateMode()));
  const auto server = GrpcEngine().connect_server({.server = "ps 0",
                                                   .user = "worker 0",
                                                   .model = 1,
                                                   .shard_bytes = {12, 8},
                                                   .row_bytes = {8},
                                                   .bfloat16 = {.shards = {true, false}, .tables = {true}}},
                                                  at(*endpoint_), kAccess);
  std::vector<float> a(3), rows(2);
  double b = 0;
  auto* const bytes_of_b = reinterpret_cast<std::byte*>(&b);
  server->write(std::vector<const std::byte*>{bytes_of(a), bytes_of_b}, in_time());
  const std::vector<float> gradient{-1.0625F, -1.00390625F, -3e38F}, of_row{-1.0625F, -1.00390625F};
  const double of_b = -1.00390625;
  const std::vector<std::int64_t> ids{4};
  server->push({.task = {0},
                .weight = 1,
                .gradients = {bytes_of(gradient), reinterpret_cast<const std::byte*>(&of_b)},
                .rows = {{ids, bytes_of(of_row)}}},
               in_time());
  std::vector<std::int64_t> versions;
  server->pull(std::vector{bytes_of(a), bytes_of_b}, versions, in_time());
  server->pull_rows(0, ids, std::as_writable_bytes(std::span(rows)), in_time());
  EXPECT_EQ(a[0], 1.0625F);
  EXPECT_EQ(a[1], 1.0F);  // to even
  EXPECT_NEAR(a[2], 3e38F, 3e38F / 256);
  EXPECT_EQ(b, 1.00390625);
  EXPECT_EQ(rows, (std::vector<float>{1.0625F, 1.0F}));
}

// The server was started again at another address.
TEST_F(GrpcService, AServerIsFoundAgain) {
  auto address = endpoint_->address();
  const auto server = GrpcEngine().connect_server(
      {.server = "ps 0", .user = "worker 0", .model = 0, .shard_bytes = {}}, [&](Deadline) { return address; },
      kAccess);
  server->open("a model", in_time());
  endpoint_.reset();
  expect_says(message_of<DeadlineExceeded>([&] { server->open("a model", Deadline::after(std::chrono::seconds(1))); }),
              "calling ps 0");
  endpoint_ = GrpcEngine().serve("127.0.0.1:0", kAccess, {models_, chief_});
  address = endpoint_->address();
  server->open("a model", in_time());
}

TEST(GrpcEndpoint, AnswersOtherHostsInATrustedNetworkAlone) {
  expect_says(message_of<ClusterError>([] { GrpcEngine().serve("0.0.0.0:0", kAccess, {}); }), "without encryption");
  auto trusted = kAccess;
  trusted.trusted_network = true;
  GrpcEngine().serve("0.0.0.0:0", trusted, {});
}

}  // namespace
}  // namespace lockstep::grpc_service
