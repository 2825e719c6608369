// For tests: an etcd cluster of some members on this host.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/child_process_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "lockstep/cluster/store.h"
#include "transport/socket.h"

namespace lockstep::etcd {

class EtcdCluster {
 public:
  explicit EtcdCluster(int size) {
    const auto folder = fresh_folder("etcd", std::to_string(getpid()));
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
      const std::vector<std::string> command{"etcd",
                                             "--name",
                                             text("m", i),
                                             "--data-dir",
                                             (folder / text("m", i)).string(),
                                             "--listen-client-urls",
                                             client,
                                             "--advertise-client-urls",
                                             client,
                                             "--listen-peer-urls",
                                             peer,
                                             "--initial-advertise-peer-urls",
                                             peer,
                                             "--initial-cluster",
                                             all,
                                             "--log-level",
                                             "error"};
      members_.push_back(std::make_unique<ChildProcess>([&]() -> std::string {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int log = ::open((folder / text("m", i, ".log")).c_str(), O_CREAT | O_WRONLY, 0600);
        ::dup2(log, STDOUT_FILENO);
        ::dup2(log, STDERR_FILENO);
        std::vector<char*> words;
        for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
        words.push_back(nullptr);
        ::execvp(words[0], words.data());
        ::_exit(127);  // the store says that nobody answers
      }));
    }
  }

  // Of a job's store, once the cluster answers.
  std::string address(const std::string& job) const { return text("etcd://", join(endpoints_, ","), "/", job); }

  void kill_member(std::size_t member) { members_[member].reset(); }

 private:
  static std::string free_address() {
    const auto listener = transport::listen_at("127.0.0.1:0", access_of_environment());
    return transport::local_address(listener);
  }

  std::vector<std::string> endpoints_;
  std::vector<std::unique_ptr<ChildProcess>> members_;
};

}  // namespace lockstep::etcd
