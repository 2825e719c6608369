#include "cluster/pmi.h"

#include <fcntl.h>

#include <cstdlib>
#include <optional>
#include <span>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

constexpr std::size_t kLongestLine = 4096;
constexpr const char* kKey = "lockstep-store";

// A PMI-1 session: each request gets one answer, both a line of name=value.
class Session {
 public:
  explicit Session(int fd) : socket_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
    if (!socket_.open()) throw ClusterError(text("PMI_FD is ", fd, ", which is no open descriptor"));
  }

  std::string ask(const std::string& command, const std::string& expected, Deadline deadline) const {
    const auto line = "cmd=" + command + "\n";
    transport::write_all(socket_, std::as_bytes(std::span(line)), deadline);
    std::string answer;
    for (char c = 0; (c = transport::read_value<char>(socket_, deadline)) != '\n';) {
      if (answer.size() == kLongestLine) throw ClusterError("PMI: the process manager's answer has no end");
      answer.push_back(c);
    }
    const bool well = answer.find("rc=") == std::string::npos || answer.find("rc=0") != std::string::npos;
    if (answer.find("cmd=" + expected) == std::string::npos || !well) {
      throw ClusterError(text("PMI: the process manager answers \"", answer, "\" to \"", command, "\""));
    }
    return answer;
  }

 private:
  FileDescriptor socket_;
};

std::string value_in(const std::string& answer, const std::string& name) {
  const auto at = answer.find(name + "=");
  if (at == std::string::npos) throw ClusterError(text("PMI: there is no ", name, " in \"", answer, "\""));
  const auto begin = at + name.size() + 1;
  return answer.substr(begin, answer.find(' ', begin) - begin);
}

Mutex manager_mutex;
std::optional<Session> session LOCKSTEP_GUARDED_BY(manager_mutex);
std::optional<std::string> shared LOCKSTEP_GUARDED_BY(manager_mutex);

void say_goodbye() {
  try {
    MutexLock lock(manager_mutex);
    if (session) session->ask("finalize", "finalize_ack", Deadline::after(std::chrono::seconds(1)));
  } catch (const Error&) {
    // The process manager is gone.
  }
}

}  // namespace

std::string share_through_pmi(int fd, bool is_rank_0, const std::string& mine, Deadline deadline) {
  MutexLock lock(manager_mutex);
  if (shared) return *shared;
  session.emplace(fd);
  session->ask("init pmi_version=1 pmi_subversion=1", "response_to_init", deadline);
  std::atexit(&say_goodbye);
  const auto space = value_in(session->ask("get_my_kvsname", "my_kvsname", deadline), "kvsname");
  const auto place = text("kvsname=", space, " key=", kKey);
  if (is_rank_0) session->ask(text("put ", place, " value=", mine), "put_result", deadline);
  session->ask("barrier_in", "barrier_out", deadline);
  return *(shared = value_in(session->ask("get " + place, "get_result", deadline), "value"));
}

}  // namespace lockstep::cluster
