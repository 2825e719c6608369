// UCX, and this rank's end of it: endpoints to the other ranks, and what has come from them.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "transport/channels.h"

namespace lockstep::transport::ucx {

// UCX, loaded when it is first needed: linked, its signal handlers and memory hooks would be in every program.

#define LOCKSTEP_UCX_FUNCTIONS(each)                                                                                   \
  each(ucp_am_data_release) each(ucp_am_recv_data_nbx) each(ucp_am_send_nbx) each(ucp_cleanup) each(ucp_config_modify) \
      each(ucp_config_read) each(ucp_config_release) each(ucp_ep_close_nbx) each(ucp_ep_create) each(ucp_ep_flush_nbx) \
          each(ucp_get_version) each(ucp_get_version_string) each(ucp_init_version) each(ucp_request_check_status)     \
              each(ucp_request_free) each(ucp_worker_arm) each(ucp_worker_create) each(ucp_worker_destroy)             \
                  each(ucp_worker_get_address) each(ucp_worker_get_efd) each(ucp_worker_progress)                      \
                      each(ucp_worker_release_address) each(ucp_worker_set_am_recv_handler) each(ucs_status_string)

// The functions that we call, under their own names.
struct Library {
#define LOCKSTEP_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  LOCKSTEP_UCX_FUNCTIONS(LOCKSTEP_UCX_MEMBER)
#undef LOCKSTEP_UCX_MEMBER
};

// Throws InvalidArgument where there is no UCX, or one that is too old. Any thread; the first call changes the
// environment for a moment.
const Library& library();

// The names of this machine's RDMA devices.
std::vector<std::string> rdma_devices();

// The header of a piece of a message.
struct Header {
  transport::MessageTag tag;
  std::uint64_t message_bytes;
  std::uint32_t number;  // of the pieces from one rank to another, counted from 0
  std::int32_t from;
};

// A piece that has arrived, or whose sender waits to be told its destination.
struct Arrival {
  Header header;
  void* data;
  std::size_t bytes;
  bool waits;
};

// An operation of UCX. Its buffer belongs to UCX until the operation has finished, or the worker has ended.
class Request {
 public:
  Request(const Library& ucx, ucs_status_ptr_t handle) : ucx_(&ucx), handle_(handle) {}
  ~Request() { forget(); }
  Request(Request&& other) noexcept : ucx_(other.ucx_), handle_(std::exchange(other.handle_, nullptr)) {}
  Request& operator=(Request&& other) noexcept {
    forget();
    ucx_ = other.ucx_;
    handle_ = std::exchange(other.handle_, nullptr);
    return *this;
  }

  // UCS_INPROGRESS, UCS_OK, or why it failed.
  ucs_status_t status() const {
    if (handle_ == nullptr) return UCS_OK;
    return UCS_PTR_IS_ERR(handle_) ? UCS_PTR_STATUS(handle_) : ucx_->ucp_request_check_status(handle_);
  }
  bool ended() const { return status() != UCS_INPROGRESS; }
  const char* reason() const { return ucx_->ucs_status_string(status()); }

 private:
  void forget() {
    if (UCS_PTR_IS_PTR(handle_)) ucx_->ucp_request_free(handle_);
  }

  const Library* ucx_;
  ucs_status_ptr_t handle_;
};

// One thread at a time.
class Worker {
 public:
  // `address`: of the device that connections go over, unless there is RDMA.
  Worker(int rank, int size, const std::string& address);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::string address() const;
  void connect(int rank, const std::string& address);

  // Moves what can move; returns whether anything did.
  bool progress() { return ucx_.ucp_worker_progress(worker_) != 0; }

  // Readable when there is something to do, if `arm` returned true before.
  int descriptor() const { return descriptor_; }
  bool arm() { return ucx_.ucp_worker_arm(worker_) == UCS_OK; }

  Request send(int to, const transport::MessageTag& tag, std::uint64_t message_bytes, const std::byte* data,
               std::size_t bytes);
  // Ends when UCX holds nothing more of what was sent to `to`, which may take progress on both sides.
  Request flush(int to);

  // Breaks all endpoints. Requests end during later calls to progress. Nothing can be sent or taken afterwards.
  void disconnect();

  // The next piece from a rank, or nothing yet.
  const Arrival* next(int from) const;
  // Takes the next piece. Ends when it lies at `into`.
  Request take(int from, std::byte* into);

  bool broken(int rank) const { return peers_[static_cast<std::size_t>(rank)].broken; }

 private:
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    bool broken = false;
    std::uint32_t sent = 0, taken = 0;  // pieces
    std::deque<Arrival> arrived;        // by number
  };

  static ucs_status_t arrive(void* self, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                             const ucp_am_recv_param_t* how);
  static void break_peer(void* peer, ucp_ep_h, ucs_status_t) { static_cast<Peer*>(peer)->broken = true; }
  void end();

  const Library& ucx_;
  const int rank_;
  std::vector<Peer> peers_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
};

}  // namespace lockstep::transport::ucx
