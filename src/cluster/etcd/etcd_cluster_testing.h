// For tests: an etcd cluster of some members on this host.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/child_process_testing.h"
#include "base/text.h"
#include "cluster/etcd/store.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::etcd {

class EtcdCluster {
 public:
  // Begins after so long, and waits until it answers. Throws Error with what the members have logged where it does not.
  explicit EtcdCluster(int size, std::chrono::milliseconds begins_after = {}) : folder_(new_folder()) {
    std::string all;
    std::vector<std::string> peers;
    for (int i = 0; i < size; ++i) {
      endpoints_.push_back(free_address());
      peers.push_back(free_address());
      all += text(i == 0 ? "" : ",", "m", i, "=http://", peers.back());
    }
    for (int i = 0; i < size; ++i) {
      const auto place = static_cast<std::size_t>(i);
      const auto client = "http://" + endpoints_[place], peer = "http://" + peers[place];
      const auto name = text("m", i);
      const auto command =
          text("exec etcd --name ", name, " --data-dir ", (folder_ / name).string(), " --listen-client-urls ", client,
               " --advertise-client-urls ", client, " --listen-peer-urls ", peer, " --initial-advertise-peer-urls ",
               peer, " --initial-cluster ", all, " --log-level error > ", (folder_ / name).string(), ".log 2>&1");
      members_.push_back(std::make_unique<ChildProcess>([&]() -> std::string {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        std::this_thread::sleep_for(begins_after);
        ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
        ::_exit(127);
      }));
    }
    wait_for_answer();
  }

  // The address of a job's store.
  std::string address(const std::string& job) const { return text("etcd://", join(endpoints_, ","), "/", job); }

  void kill_member(std::size_t member) { members_[member].reset(); }

 private:
  static std::string free_address() {
    const auto listener = transport::listen_at("127.0.0.1:0", access_of_environment());
    return transport::local_address(listener);
  }

  // In memory: members wait for the disk at each write, for seconds where the disk is busy.
  static std::filesystem::path new_folder() {
    std::string name = "/dev/shm/lockstep-etcd-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw Error("no folder in /dev/shm");
    return name;
  }

  void wait_for_answer() const {
    constexpr std::chrono::seconds kToStart(60);
    try {
      EtcdStore::connect(address("start"), Deadline::after(kToStart), {.trusted_network = true});
    } catch (const Error& error) {
      std::string said = error.what();
      for (std::size_t i = 0; i < members_.size(); ++i) {
        std::ifstream log(folder_ / text("m", i, ".log"));
        said += text("\nm", i, ": ") + std::string(std::istreambuf_iterator<char>(log), {});
      }
      throw Error(said);
    }
  }

  const std::filesystem::path folder_;
  const std::shared_ptr<void> removed_at_end_{nullptr, [folder = folder_](void*) {
                                                std::error_code ignored;
                                                std::filesystem::remove_all(folder, ignored);
                                              }};
  std::vector<std::string> endpoints_;
  std::vector<std::unique_ptr<ChildProcess>> members_;  // end before their folder goes
};

}  // namespace lockstep::etcd
