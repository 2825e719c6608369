// UCX, loaded when it is first needed: linked, its signal handlers and memory hooks would be in every program.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

namespace lockstep::transport::ucx {

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

}  // namespace lockstep::transport::ucx
