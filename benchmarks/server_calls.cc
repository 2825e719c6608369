// Measures how fast a worker's calls move values and gradients to and from a parameter server on this host. They go
// over the socket, with TLS, or in shared memory; plain sockets compare. Prints one line of JSON.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "../examples/arguments.h"
#include "lockstep/base/error.h"
#include "parameter_server/served_models.h"
#include "parameter_server/service.h"
#include "parameter_server/shared_block.h"

using namespace lockstep;
using namespace lockstep::parameter_server;

namespace {

constexpr const char* kModel = "the model of server_calls";

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

struct Pipe {
  Pipe() {
    if (pipe(ends) != 0) throw IoError("no pipe");
  }
  int ends[2];
};

// Answers until the other end of `ended` is closed.
void serve(std::size_t bytes, const Access& access, int address, int ended) {
  const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
  const std::vector<VariableSpec> variables{{"w", DType::float32, {count}}};
  const auto models = std::make_shared<ServedModels>(1);
  models->add(0, kModel,
              std::make_shared<ShardStore>(ModelSpec{variables}, place_shards(variables, {}, 1), ServerNumber(),
                                           SGD({.learning_rate = 1e-3}), UpdateMode()));
  const auto endpoint = service_engine().serve("127.0.0.1:0", access, {.models = models});
  const auto text = endpoint->address() + "\n";
  char byte = 0;
  if (write(address, text.data(), text.size()) < 0 || read(ended, &byte, 1) < 0) std::_Exit(1);
}

void move_all(int socket, std::byte* data, std::size_t count, bool sends) {
  while (count > 0) {
    const auto moved = sends ? send(socket, data, count, 0) : recv(socket, data, count, 0);
    if (moved <= 0) std::_Exit(1);
    data += moved;
    count -= static_cast<std::size_t>(moved);
  }
}

// The best of some rounds, after one more.
template <class Act>
double best_seconds(int rounds, const Act& act) {
  double best = 1e9;
  for (int round = 0; round <= rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    act();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (round > 0) best = std::min(best, seconds);
  }
  return best;
}

// `bytes` there and as many back, over a socket on loopback.
double raw_seconds(std::size_t bytes, int rounds) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, any, length) != 0 || getsockname(listener, any, &length) != 0 || listen(listener, 1) != 0) {
    throw IoError("no socket");
  }
  std::vector<std::byte> data(bytes);
  const auto without_delay = [](int socket) {
    const int one = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return socket;
  };
  const auto child = fork();
  if (child == 0) {
    const int link = without_delay(accept(listener, nullptr, nullptr));
    for (int round = 0; round <= rounds; ++round) {
      move_all(link, data.data(), bytes, false);
      move_all(link, data.data(), bytes, true);
    }
    std::_Exit(0);
  }
  const int link = without_delay(socket(AF_INET, SOCK_STREAM, 0));
  if (connect(link, any, length) != 0) throw IoError("no connection");
  const double seconds = best_seconds(rounds, [&] {
    move_all(link, data.data(), bytes, true);
    move_all(link, data.data(), bytes, false);
  });
  waitpid(child, nullptr, 0);
  close(link);
  close(listener);
  return seconds;
}

// A push of gradients and a pull of values, `bytes` each, in memory that the server accesses or not.
double call_seconds(const std::string& address, const Access& access, std::size_t bytes, int rounds, bool shared) {
  static std::int64_t step = 0;
  const auto server = service_engine().connect_server(
      {.server = "ps 0", .user = "worker 0", .model = 0, .shard_bytes = {bytes}}, [&](Deadline) { return address; },
      access);
  server->open(kModel, soon());
  const auto block = SharedBlock::make(2 * bytes);
  if (shared && !server->share(block, soon())) throw Error("the server cannot access this process's memory");
  auto* const values = block->begin();
  const std::byte* const gradients = values + bytes;
  std::fill_n(values, 2 * bytes, std::byte{0});
  server->write(std::vector<const std::byte*>{values}, soon());
  return best_seconds(rounds, [&] {
    server->push({.task = {step++}, .weight = 1, .gradients = {gradients}, .memory = block}, soon());
    std::vector<std::int64_t> versions;
    server->pull(std::vector{values}, versions, soon());
  });
}

// The seconds of calls to a server that is another process.
struct Seconds {
  double sent = 0, shared = 0;
};
Seconds seconds_of_calls(const Access& access, std::size_t bytes, int rounds) {
  Pipe address, end;
  const auto child = fork();
  if (child == 0) {
    close(end.ends[1]);
    serve(bytes, access, address.ends[1], end.ends[0]);
    std::_Exit(0);
  }
  std::string text(64, '\0');
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, read(address.ends[0], text.data(), text.size()))));
  text = text.substr(0, text.find('\n'));
  const Seconds seconds{.sent = call_seconds(text, access, bytes, rounds, false),
                        .shared = call_seconds(text, access, bytes, rounds, true)};
  close(end.ends[1]);
  waitpid(child, nullptr, 0);
  return seconds;
}

// Measures in a process of its own, because a process that has used gRPC cannot fork.
Seconds apart(const Access& access, std::size_t bytes, int rounds) {
  Pipe result;
  const auto child = fork();
  if (child == 0) {
    const auto seconds = seconds_of_calls(access, bytes, rounds);
    std::_Exit(write(result.ends[1], &seconds, sizeof seconds) == sizeof seconds ? 0 : 1);
  }
  close(result.ends[1]);
  Seconds seconds;
  const auto got = read(result.ends[0], &seconds, sizeof seconds);
  waitpid(child, nullptr, 0);
  if (got != sizeof seconds) throw Error("a process that calls a server failed");
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t bytes = std::size_t{64} << 20;
  int rounds = 9;
  std::string certificates;
  Arguments arguments("Measures calls to a parameter server");
  arguments.option("--certs", certificates, "a folder that `lockstep certs` made: measures calls with TLS too");
  arguments.option("--bytes", bytes, "of gradients, and of values").from(4096, 4294967296);
  arguments.option("--rounds", rounds, "of which the best counts").from(1);
  arguments.parse(argc, argv);
  bytes -= bytes % sizeof(double);
  try {
    const double raw = raw_seconds(bytes, rounds);
    Access access{.token = std::string(32, 't')};
    const auto plain = apart(access, bytes, rounds);
    const auto rate = [&](double seconds) { return 2 * static_cast<double>(bytes) / seconds; };
    nlohmann::ordered_json result{{"bytes", bytes},
                                  {"raw_bytes_per_s", rate(raw)},
                                  {"sent_bytes_per_s", rate(plain.sent)},
                                  {"shared_bytes_per_s", rate(plain.shared)}};
    if (!certificates.empty()) {
      access.certificates = certificates;
      result["tls_bytes_per_s"] = rate(apart(access, bytes, rounds).sent);
    }
    std::cout << result.dump() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "server_calls: " << error.what() << "\n";
    return 1;
  }
}
