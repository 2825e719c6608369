#include "transport/ucx/worker.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep::transport::ucx {
namespace {

// The longest wait for pending operations before the worker is destroyed.
constexpr std::chrono::seconds kForClosing(1);

void require(const Library& ucx, ucs_status_t status, const char* what) {
  if (status != UCS_OK) throw ClusterError(text("UCX cannot ", what, ": ", ucx.ucs_status_string(status)));
}

// The network devices that UCX may use: the one with `address`, and those for RDMA unless it is a loopback's.
std::string devices_for(const std::string& address) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return "all";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(first, freeifaddrs);
  std::string devices;
  bool loopback = false;
  for (const auto* one = first; one != nullptr && devices.empty(); one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char host[NI_MAXHOST] = "";
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    getnameinfo(one->ifa_addr, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
    if (address != host && address != text("[", host, "]")) continue;
    devices = one->ifa_name;
    loopback = (one->ifa_flags & IFF_LOOPBACK) != 0;
  }
  if (devices.empty()) return "all";
  if (!loopback) {
    for (const auto& device : rdma_devices()) devices += "," + device + ":1";
  }
  return devices;
}

// UCX's own defaults, with exceptions. Ranks of different hosts never share memory; other networks are not used. TCP
// has larger segments, equal on all hosts (else UCX writes beyond them): 32 MiB take a quarter of the time. Data sent
// before the receiver is ready fit into the socket: UCX would send the rest only in this rank's next call. The user's
// UCX_* variables take precedence.
std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> make_settings(const Library& ucx, const std::string& address) {
  ucp_config_t* made = nullptr;
  require(ucx, ucx.ucp_config_read(nullptr, nullptr, &made), "read its settings");
  std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> settings(made, ucx.ucp_config_release);
  for (const auto& [name, value] : std::initializer_list<std::pair<std::string, std::string>>{
           {"TLS", "^shm"},
           {"KEEPALIVE_INTERVAL", "inf"},  // the failure channel hears of deaths
           {"NET_DEVICES", devices_for(address)},
           {"TCP_TX_SEG_SIZE", "512K"},
           {"TCP_RX_SEG_SIZE", "512K"},
           {"RNDV_THRESH", "8K"}}) {
    if (std::getenv(("UCX_" + name).c_str()) == nullptr) ucx.ucp_config_modify(made, name.c_str(), value.c_str());
  }
  return settings;
}

}  // namespace

Worker::Worker(int rank, int size, const std::string& address)
    : ucx_(library()), rank_(rank), peers_(static_cast<std::size_t>(size)) {
  const auto settings = make_settings(ucx_, address);
  ucp_params_t wanted{};
  wanted.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  wanted.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  wanted.estimated_num_eps = static_cast<std::size_t>(size);
  require(ucx_, ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &wanted, settings.get(), &context_), "start");
  try {
    ucp_worker_params_t of_worker{};
    of_worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    of_worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    require(ucx_, ucx_.ucp_worker_create(context_, &of_worker, &worker_), "make a worker");
    require(ucx_, ucx_.ucp_worker_get_efd(worker_, &descriptor_), "make a descriptor");
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
    handler.cb = arrive;
    handler.arg = this;
    require(ucx_, ucx_.ucp_worker_set_am_recv_handler(worker_, &handler), "receive");
  } catch (...) {
    end();
    throw;
  }
}

Worker::~Worker() { end(); }

std::string Worker::address() const {
  ucp_address_t* bytes = nullptr;
  std::size_t count = 0;
  require(ucx_, ucx_.ucp_worker_get_address(worker_, &bytes, &count), "tell its address");
  const std::string address(reinterpret_cast<const char*>(bytes), count);
  ucx_.ucp_worker_release_address(worker_, bytes);
  return address;
}

void Worker::connect(int rank, const std::string& address) {
  auto& peer = peers_[static_cast<std::size_t>(rank)];
  ucp_ep_params_t to{};
  to.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  to.address = reinterpret_cast<const ucp_address_t*>(address.data());
  to.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  to.err_handler = {break_peer, &peer};
  const auto status = ucx_.ucp_ep_create(worker_, &to, &peer.endpoint);
  require(ucx_, status, text("connect to rank ", rank).c_str());
}

Request Worker::send(int to, const transport::MessageTag& tag, std::uint64_t message_bytes, const std::byte* data,
                     std::size_t bytes) {
  auto& peer = peers_[static_cast<std::size_t>(to)];
  const Header header{tag, message_bytes, peer.sent++, rank_};
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  how.flags = UCP_AM_SEND_FLAG_COPY_HEADER;
  how.memory_type = UCS_MEMORY_TYPE_HOST;
  return {ucx_, ucx_.ucp_am_send_nbx(peer.endpoint, 0, &header, sizeof header, data, bytes, &how)};
}

Request Worker::flush(int to) {
  const ucp_request_param_t how{};
  return {ucx_, ucx_.ucp_ep_flush_nbx(peers_[static_cast<std::size_t>(to)].endpoint, &how)};
}

// Keeps the piece, in order: pieces that take different paths may overtake each other.
ucs_status_t Worker::arrive(void* self, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                            const ucp_am_recv_param_t* how) {
  auto& worker = *static_cast<Worker*>(self);
  Arrival arrival{{}, data, bytes, (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0};
  if (header_bytes != sizeof arrival.header) return UCS_OK;
  std::memcpy(&arrival.header, header, header_bytes);
  if (arrival.header.from < 0 || static_cast<std::size_t>(arrival.header.from) >= worker.peers_.size()) return UCS_OK;
  const bool keeps = arrival.waits || (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;
  if (!keeps) arrival.data = nullptr;
  auto& arrived = worker.peers_[static_cast<std::size_t>(arrival.header.from)].arrived;
  const auto after = std::find_if(arrived.rbegin(), arrived.rend(), [&](const Arrival& other) {
    return static_cast<std::int32_t>(other.header.number - arrival.header.number) < 0;
  });
  arrived.insert(after.base(), arrival);
  return keeps ? UCS_INPROGRESS : UCS_OK;
}

const Arrival* Worker::next(int from) const {
  const auto& peer = peers_[static_cast<std::size_t>(from)];
  return peer.arrived.empty() || peer.arrived.front().header.number != peer.taken ? nullptr : &peer.arrived.front();
}

Request Worker::take(int from, std::byte* into) {
  auto& peer = peers_[static_cast<std::size_t>(from)];
  const auto arrival = peer.arrived.front();
  peer.arrived.pop_front();
  ++peer.taken;
  if (!arrival.waits) {
    if (arrival.bytes > 0) std::memcpy(into, arrival.data, arrival.bytes);
    if (arrival.data != nullptr) ucx_.ucp_am_data_release(worker_, arrival.data);
    return {ucx_, nullptr};
  }
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  how.memory_type = UCS_MEMORY_TYPE_HOST;
  return {ucx_, ucx_.ucp_am_recv_data_nbx(worker_, arrival.data, into, arrival.bytes, &how)};
}

void Worker::disconnect() {
  for (auto& peer : peers_) {
    for (const auto& arrival : peer.arrived) {
      if (arrival.data != nullptr) ucx_.ucp_am_data_release(worker_, arrival.data);
    }
    peer.arrived.clear();
  }
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  how.flags = UCP_EP_CLOSE_FLAG_FORCE;
  for (auto& peer : peers_) {
    if (peer.endpoint != nullptr) Request(ucx_, ucx_.ucp_ep_close_nbx(peer.endpoint, &how));
    peer.endpoint = nullptr;
    peer.broken = true;
  }
}

void Worker::end() {
  if (worker_ != nullptr) {
    disconnect();
    // UCX 1.22 frees pending operations of endpoints twice if the worker is destroyed first.
    const auto until = Deadline::after(kForClosing);
    while (progress() && !until.passed()) {
    }
    ucx_.ucp_worker_destroy(worker_);
  }
  if (context_ != nullptr) ucx_.ucp_cleanup(context_);
}

}  // namespace lockstep::transport::ucx
