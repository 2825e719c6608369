#include "parameter_server/grpc_service/caller.h"

#include <thread>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/credentials.h"
#include "parameter_server/grpc_service/frames.h"

namespace lockstep::grpc_service {
namespace {

constexpr std::chrono::milliseconds kBetweenAttempts(50);

std::chrono::duration<double> left(Deadline deadline) {
  return std::max(std::chrono::duration<double>(0),
                  std::chrono::duration<double>(deadline.time() - Deadline::Clock::now()));
}

std::chrono::system_clock::time_point system_time(Deadline deadline) {
  constexpr std::chrono::hours kLongest(24);
  const auto wait = std::min<std::chrono::duration<double>>(left(deadline), kLongest);
  return std::chrono::system_clock::now() + std::chrono::duration_cast<std::chrono::milliseconds>(wait);
}

}  // namespace

Caller::Caller(std::string name, parameter_server::FindAddress address, const Access& access, double reconnect_seconds)
    : name_(std::move(name)),
      find_address_(std::move(address)),
      access_(access),
      identity_(access),
      reconnect_seconds_(reconnect_seconds) {}

// The channel to where the process answers now. Null where the process does not answer; `problem` then says why.
std::shared_ptr<grpc::Channel> Caller::channel(Deadline deadline, std::string& problem) {
  {
    MutexLock lock(mutex_);
    if (channel_) return channel_;
  }
  const auto address = called_address(find_address_(deadline), access_, name_);
  auto opened = open_channel(address, access_, deadline, problem);
  if (!opened) {
    problem = text(address, ": ", problem);
    return nullptr;
  }
  MutexLock lock(mutex_);
  if (!channel_) channel_ = std::move(opened);  // else another thread was first
  return channel_;
}

void Caller::forget(const std::shared_ptr<grpc::Channel>& channel) {
  MutexLock lock(mutex_);
  if (channel_ == channel) channel_ = nullptr;
}

std::unique_ptr<ClientStream> Caller::stream(const std::shared_ptr<grpc::Channel>& channel,
                                             grpc::ClientContext& context) {
  const grpc::internal::RpcMethod method(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING, channel);
  identity_.add_to(context);
  using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;
  return std::unique_ptr<ClientStream>(Factory::Create(channel.get(), method, &context));
}

grpc::Status Caller::attempt(const Request& request, Deadline deadline, const Bulk& bulk, const ReadBulk& read_bulk,
                             Reply& reply) {
  std::string problem;
  const auto channel = this->channel(deadline, problem);
  if (!channel) return {grpc::StatusCode::UNAVAILABLE, problem};
  const auto status = attempt_on(channel, request, deadline, bulk, read_bulk, reply);
  if (!status.ok() && may_come_back(status)) forget(channel);
  return status;
}

grpc::Status Caller::attempt_on(const std::shared_ptr<grpc::Channel>& channel, const Request& request,
                                Deadline deadline, const Bulk& bulk, const ReadBulk& read_bulk, Reply& reply) {
  grpc::ClientContext context;
  context.set_deadline(system_time(deadline));
  const auto call = stream(channel, context);
  const auto write = [&](const grpc::ByteBuffer& frame) { return call->Write(frame); };
  if (write(frame_of(request)) && write_bulk(bulk, write)) call->WritesDone();
  grpc::ByteBuffer frame;
  if (call->Read(&frame)) {
    if (!parse(frame, reply)) return {grpc::StatusCode::INTERNAL, "the answer cannot be read (another version?)"};
    bool more = true;
    try {
      read_bulk(reply, [&](grpc::ByteBuffer& into) { return more = call->Read(&into); });
    } catch (const InvalidArgument& error) {
      if (more) context.TryCancel();
      const auto status = call->Finish();
      return status.ok() || more ? grpc::Status(grpc::StatusCode::INTERNAL, error.what()) : status;
    }
  }
  return call->Finish();
}

Reply Caller::call(Request request, Deadline deadline, const Bulk& bulk, std::span<const std::span<std::byte>> parts) {
  return call(std::move(request), deadline, bulk, [&](const Reply&, const ReadFrame& read) { read_bulk(parts, read); });
}

std::optional<std::string> Caller::call_for_text(Request request, Deadline deadline) {
  std::string words;
  const auto reply = call(std::move(request), deadline, {}, words);
  return reply.has_text_bytes() ? std::optional(std::move(words)) : std::nullopt;
}

Reply Caller::call(Request request, Deadline deadline, const Bulk& bulk, std::string& words) {
  return call(std::move(request), deadline, bulk, [&](const Reply& reply, const ReadFrame& read) {
    if (reply.text_bytes() > parameter_server::kLongestOutput) {
      throw InvalidArgument(text("an answer of ", reply.text_bytes(), " bytes"));
    }
    words.resize(reply.text_bytes());
    const auto whole = std::as_writable_bytes(std::span(words));
    read_bulk({&whole, 1}, read);
  });
}

Reply Caller::call(Request request, Deadline deadline, const Bulk& bulk, const ReadBulk& read_bulk) {
  std::optional<Deadline> reconnected_by;
  while (true) {
    request.set_seconds(left(deadline).count());
    Reply reply;
    const auto status = attempt(request, deadline, bulk, read_bulk, reply);
    if (status.ok()) return reply;
    if (!reconnected_by) reconnected_by = Deadline::after(std::chrono::duration<double>(reconnect_seconds_));
    const bool too_late = deadline.passed() || reconnected_by->passed();
    if (too_late && is_refused_certificate(status.error_message())) {
      throw ClusterError(text(name_, " has no certificate of this job: ", kCertificatesVariable, " (here ",
                              access_.certificates, ") must name the same files in all processes, and they must not ",
                              "have expired (", status.error_message(), ")"));
    }
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED || (may_come_back(status) && too_late)) {
      throw DeadlineExceeded("calling " + name_, deadline.waited(), {}, text(" (", status.error_message(), ")"));
    }
    if (!may_come_back(status)) throw_status(status, name_);
    refused_.log(text("calling ", name_, ": ", status.error_message(), "; trying again"));
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

std::unique_ptr<ClientStream> Caller::open(const Request& request, grpc::ClientContext& context, Reply& reply,
                                           Deadline deadline) {
  // The stream lives longer than the wait for its first answer, so that gRPC's own deadline would not do.
  const std::jthread timer([&](const std::stop_token& stop) {
    if (!stop_requested_by(deadline, stop)) context.TryCancel();
  });
  std::string problem;
  const auto channel = this->channel(deadline, problem);
  if (!channel) return nullptr;
  auto call = stream(channel, context);
  grpc::ByteBuffer frame;
  if (call->Write(frame_of(request)) && call->Read(&frame) && parse(frame, reply)) return call;
  context.TryCancel();
  call->Finish();
  forget(channel);
  return nullptr;
}

}  // namespace lockstep::grpc_service
