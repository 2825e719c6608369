// Calls one other process, which may be started again elsewhere meanwhile.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "base/log.h"
#include "base/mutex.h"
#include "parameter_server/grpc_service/credentials.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/grpc_service/messages.pb.h"
#include "parameter_server/service.h"

namespace lockstep::grpc_service {

using ClientStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

// Any thread.
class Caller {
 public:
  // `name`: of the other process, in errors. `reconnect_seconds`: how long it is called again while it cannot be
  // reached.
  Caller(std::string name, parameter_server::FindAddress address, const Access& access,
         double reconnect_seconds = std::numeric_limits<double>::infinity());

  // Sends request and bulk, and returns the reply, after whose head `parts` are filled. Calls again where the process
  // cannot be reached, for reconnect_seconds and at most until the deadline. Throws what the process answers, and
  // DeadlineExceeded.
  Reply call(Request request, Deadline deadline, const Bulk& bulk = {},
             std::span<const std::span<std::byte>> parts = {});

  // As `call`, for a reply of a text; nothing where the reply has none.
  std::optional<std::string> call_for_text(Request request, Deadline deadline);

  // A reply with a text, which may be empty.
  Reply call(Request request, Deadline deadline, const Bulk& bulk, std::string& words);

  // Reads the bulk data of a reply by read_bulk(reply, read): read(frame) yields them until it returns false. read_bulk
  // is called again, from the beginning, where the other process could not be reached any more.
  using ReadFrame = std::function<bool(grpc::ByteBuffer&)>;
  using ReadBulk = std::function<void(const Reply& reply, const ReadFrame& read)>;
  Reply call(Request request, Deadline deadline, const Bulk& bulk, const ReadBulk& read_bulk);

  // Opens a stream that the caller keeps, and returns it after the reply; null where there is none by the deadline.
  std::unique_ptr<ClientStream> open(const Request& request, grpc::ClientContext& context, Reply& reply,
                                     Deadline deadline);

 private:
  std::shared_ptr<grpc::Channel> channel(Deadline deadline, std::string& problem);
  // The next call looks up the address again: whoever answers there now need not be of the job.
  void forget(const std::shared_ptr<grpc::Channel>& channel);
  std::unique_ptr<ClientStream> stream(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext& context);
  grpc::Status attempt(const Request& request, Deadline deadline, const Bulk& bulk, const ReadBulk& read_bulk,
                       Reply& reply);
  grpc::Status attempt_on(const std::shared_ptr<grpc::Channel>& channel, const Request& request, Deadline deadline,
                          const Bulk& bulk, const ReadBulk& read_bulk, Reply& reply);

  const std::string name_;
  const parameter_server::FindAddress find_address_;
  const Access access_;
  const Identity identity_;
  const double reconnect_seconds_;
  RepeatedWarning refused_;
  Mutex mutex_;
  std::shared_ptr<grpc::Channel> channel_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::grpc_service
