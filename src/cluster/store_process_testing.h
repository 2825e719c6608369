// For tests that fork: a store in a process of its own. A child that is forked beside a thread may inherit a lock that
// the thread holds. A lock of the sanitizers' allocators is one, which glibc's atfork handlers do not know.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/child_process_testing.h"
#include "lockstep/cluster/store.h"
#include "transport/socket.h"

namespace lockstep::cluster {

class StoreProcess {
 public:
  // Holds the store at a port that was free a moment ago. Store::connect waits for it.
  explicit StoreProcess(const Access& access = access_of_environment()) : StoreProcess(free_address(access), access) {}
  explicit StoreProcess(std::string address, const Access& access = access_of_environment())
      : address_(std::move(address)), holder_([this, &access]() -> std::string {
          ::prctl(PR_SET_PDEATHSIG, SIGKILL);
          const auto store = Store::hold(address_, access);
          for (;;) ::pause();
        }) {}

  const std::string& address() const { return address_; }

 private:
  static std::string free_address(const Access& access) {
    const auto listener = transport::listen_at("127.0.0.1:0", access);
    return transport::local_address(listener);
  }

  const std::string address_;
  const ChildProcess holder_;  // ended with this
};

}  // namespace lockstep::cluster
