#include "cluster/etcd/client.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <random>
#include <thread>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::etcd {

namespace {

// The wait for one member's answer; then another member is asked.
constexpr double kForAnswerSeconds = 2;
constexpr std::chrono::milliseconds kBetweenAttempts(20);

bool another_may_answer(const grpc::Status& status) {
  const auto code = status.error_code();
  return code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::DEADLINE_EXCEEDED ||
         code == grpc::StatusCode::CANCELLED || code == grpc::StatusCode::UNKNOWN ||  // a proposal was dropped
         code == grpc::StatusCode::RESOURCE_EXHAUSTED;
}

// Leaves time for an attempt with each of the `members`.
std::chrono::system_clock::time_point end_of_attempt(Deadline deadline, std::size_t members) {
  const std::chrono::duration<double> left = deadline.time() - Deadline::Clock::now();
  const double seconds = std::clamp(left.count() / static_cast<double>(members), 0.001, kForAnswerSeconds);
  return std::chrono::system_clock::now() + std::chrono::microseconds(static_cast<std::int64_t>(seconds * 1e6));
}

template <class Request, class Response>
std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> open(const char* method,
                                                                  const std::shared_ptr<grpc::Channel>& channel,
                                                                  grpc::ClientContext& context) {
  using Factory = grpc::internal::ClientReaderWriterFactory<Request, Response>;
  const grpc::internal::RpcMethod of(method, grpc::internal::RpcMethod::BIDI_STREAMING, channel);
  return std::unique_ptr<grpc::ClientReaderWriter<Request, Response>>(Factory::Create(channel.get(), of, &context));
}

}  // namespace

Range prefix_range(const std::string& prefix) {
  auto end = prefix;
  ++end.back();  // prefixes of ours end with a printable character
  return {prefix, end};
}

Client::Client(const std::vector<std::string>& endpoints) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // The time for a connection, for example to a member that waits for its disk: 20 s unless it is set.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(kForAnswerSeconds * 1e3));
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  for (const auto& endpoint : endpoints) {
    channels_.emplace_back(endpoint,
                           grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments));
  }
  MutexLock lock(mutex_);
  current_ = std::random_device()() % channels_.size();
}

std::size_t Client::current() {
  MutexLock lock(mutex_);
  return current_;
}

void Client::leave(std::size_t member) {
  MutexLock lock(mutex_);
  if (current_ == member) current_ = (current_ + 1) % channels_.size();
}

// A channel makes progress on connecting only while a thread waits for it. Calls on a channel whose last attempt failed
// return at once, so that without this wait no connection would be made.
void Client::pause() {
  const auto began = Deadline::Clock::now();
  channels_[current()].second->WaitForConnected(std::chrono::system_clock::now() + kBetweenAttempts);
  std::this_thread::sleep_until(began + kBetweenAttempts);
}

std::string Client::endpoint() { return channels_[current()].first; }

// attempt(channel, context) returns a status.
template <class Attempt>
void Client::call(Deadline deadline, const Attempt& attempt) {
  while (true) {
    const auto member = current();
    const auto& [endpoint, channel] = channels_[member];
    grpc::ClientContext context;
    context.set_deadline(end_of_attempt(deadline, channels_.size()));
    const grpc::Status status = attempt(channel, context);
    if (status.ok()) return;
    const auto what = text("etcd at ", endpoint, ": ", status.error_message());
    if (!another_may_answer(status)) throw ClusterError(what);
    leave(member);
    if (deadline.passed()) throw DeadlineExceeded("asking etcd", deadline.waited(), {}, text(" (", what, ")"));
    pause();
  }
}

template <class Request, class Response>
Response Client::unary(const char* method, const Request& request, Deadline deadline) {
  Response response;
  call(deadline, [&](const auto& channel, auto& context) {
    const grpc::internal::RpcMethod of(method, grpc::internal::RpcMethod::NORMAL_RPC, channel);
    using google::protobuf::MessageLite;
    return grpc::internal::BlockingUnaryCall<Request, Response, MessageLite, MessageLite>(channel.get(), of, &context,
                                                                                          request, &response);
  });
  return response;
}

TxnResponse Client::txn(const TxnRequest& request, Deadline deadline) {
  return unary<TxnRequest, TxnResponse>("/etcdserverpb.KV/Txn", request, deadline);
}

std::int64_t Client::grant(std::int64_t seconds, Deadline deadline) {
  LeaseGrantRequest request;
  request.set_ttl(seconds);
  return unary<LeaseGrantRequest, LeaseGrantResponse>("/etcdserverpb.Lease/LeaseGrant", request, deadline).id();
}

void Client::revoke(std::int64_t lease, Deadline deadline) {
  LeaseRevokeRequest request;
  request.set_id(lease);
  try {
    unary<LeaseRevokeRequest, LeaseRevokeResponse>("/etcdserverpb.Lease/LeaseRevoke", request, deadline);
  } catch (const ClusterError&) {  // there is none any more
  }
}

bool Client::keep_alive(std::int64_t lease, Deadline deadline) {
  LeaseKeepAliveRequest request;
  request.set_id(lease);
  LeaseKeepAliveResponse response;
  call(deadline, [&](const auto& channel, auto& context) {
    const auto stream =
        open<LeaseKeepAliveRequest, LeaseKeepAliveResponse>("/etcdserverpb.Lease/LeaseKeepAlive", channel, context);
    if (stream->Write(request) && stream->WritesDone() && stream->Read(&response)) {
      context.TryCancel();
      stream->Finish();
      return grpc::Status::OK;
    }
    return stream->Finish();
  });
  return response.ttl() > 0;
}

void Client::wait_for_change(const std::vector<Range>& ranges, std::int64_t since, Deadline deadline) {
  const auto member = current();
  grpc::ClientContext context;
  context.set_deadline(end_of_attempt(deadline, 1));
  const auto stream = open<WatchRequest, WatchResponse>("/etcdserverpb.Watch/Watch", channels_[member].second, context);
  bool goes_on = true;
  for (const auto& [key, end] : ranges) {
    WatchRequest request;
    auto& create = *request.mutable_create_request();
    create.set_key(key);
    create.set_range_end(end);
    create.set_start_revision(since + 1);
    goes_on = goes_on && stream->Write(request);
  }
  for (WatchResponse response; goes_on && stream->Read(&response);) {
    if (response.events_size() > 0 || response.canceled()) goes_on = false;
  }
  context.TryCancel();
  const auto code = stream->Finish().error_code();
  if (code == grpc::StatusCode::CANCELLED || code == grpc::StatusCode::DEADLINE_EXCEEDED) return;
  leave(member);
  pause();
}

namespace {

constexpr std::chrono::milliseconds kBetweenRenewals(kLeaseSeconds * 1000 / 4);

}  // namespace

Leases::Leases(Client& client) : client_(client), thread_([this](const std::stop_token& stop) { renew(stop); }) {}

void Leases::add(std::int64_t lease) {
  MutexLock lock(mutex_);
  leases_.insert(lease);
}

void Leases::remove(std::int64_t lease) {
  MutexLock lock(mutex_);
  leases_.erase(lease);
}

void Leases::renew(const std::stop_token& stop) {
  while (!stop_requested_by(Deadline::after(kBetweenRenewals), stop)) {
    std::set<std::int64_t> leases;
    {
      MutexLock lock(mutex_);
      leases = leases_;
    }
    for (const auto lease : leases) {
      try {
        if (client_.keep_alive(lease, Deadline::after(kBetweenRenewals))) continue;
        MutexLock lock(mutex_);
        if (leases_.erase(lease) == 0) continue;  // it was given up meanwhile
        log_warning("etcd did not hear from this process in time: the others of its job may take it for lost");
      } catch (const Error&) {  // the cluster does not answer: again next time
      }
    }
  }
}

}  // namespace lockstep::etcd
