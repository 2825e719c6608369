#include "grpc_service/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>

#include "base/text.h"
#include "grpc_service/credentials.h"
#include "grpc_service/frames.h"
#include "lockstep/base/error.h"

namespace lockstep::grpc_service {
namespace {

// A process of the job needs milliseconds. Who does not prove is not waited for: its place may be a stranger's now.
constexpr std::chrono::seconds kToProveItself(5);

grpc::ChannelArguments channel_arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kLongestMessage));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return arguments;
}

std::shared_ptr<grpc::Channel> tls_channel(const std::string& address, const Access& access) {
  auto arguments = channel_arguments();
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetSslTargetNameOverride(kTlsName);
  return grpc::CreateCustomChannel(address, channel_credentials(access), arguments);
}

}  // namespace

transport::Greeting calls_greeting() { return {.protocol = {'c', 'a', 'l', 'l', 's'}}; }

std::shared_ptr<grpc::Channel> open_channel(const std::string& address, const Access& access, Deadline deadline,
                                            std::string& problem) {
  if (!access.certificates.empty()) return tls_channel(address, access);
  const auto to_prove = Deadline::after(kToProveItself);
  const auto soonest = to_prove.time() < deadline.time() ? to_prove : deadline;
  auto socket = transport::connect_once(address, soonest, problem);
  if (!socket.open()) return nullptr;
  try {
    transport::introduce(socket, access, calls_greeting(), soonest);
  } catch (const DeadlineExceeded&) {
    problem = "who answers there is silent";
    return nullptr;
  } catch (const ClusterError& error) {
    problem = error.what();
    return nullptr;
  }
  return grpc::CreateCustomInsecureChannelFromFd(address, socket.release(), channel_arguments());
}

}  // namespace lockstep::grpc_service
