#include "cluster/launch/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "cluster/launch/launcher_process.h"
#include "cluster/launch/other_launcher.h"
#include "lockstep/base/error.h"

extern char** environ;

namespace lockstep::launch {
namespace {

// Writes all bytes without waiting; false where they do not fit, or nobody reads any more.
bool say(const FileDescriptor& socket, const std::string& bytes) {
  return send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

// The child's end of its standard input, which begins with these bytes; `mine` is then the end that writes to it.
// Without bytes, standard input is /dev/null.
FileDescriptor input_of(const std::optional<std::string>& bytes, FileDescriptor& mine) {
  if (!bytes) return FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw ClusterError(text("cannot make a pair of sockets: ", std::strerror(errno)));
  }
  FileDescriptor theirs(ends[0]);
  mine = FileDescriptor(ends[1]);
  if (say(mine, *bytes)) return theirs;
  throw InvalidArgument(text("lockstep run: the command and what -x names are too long (", bytes->size(), " bytes)"));
}

std::vector<std::string> with(const std::map<std::string, std::string>& added) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable = *entry;
    if (!added.contains(variable.substr(0, variable.find('=')))) all.push_back(variable);
  }
  for (const auto& [name, value] : added) all.push_back(name + "=" + value);
  return all;
}

// Between fork and exec: system calls alone.
[[noreturn]] void become(char** command, char** environment, int in, int out, int error, int problem, pid_t launcher) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_DFL);
  if (getppid() != launcher) _exit(1);  // it ended meanwhile
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(in, STDIN_FILENO);  // a background process group that reads from the terminal is stopped
  dup2(out, STDOUT_FILENO);
  dup2(error, STDERR_FILENO);
  execvpe(command[0], command, environment);
  const int reason = errno;
  [[maybe_unused]] const auto written = write(problem, &reason, sizeof reason);
  _exit(127);
}

// A log's name is known to all: where others have put a link or a FIFO there, nothing is written.
FileDescriptor open_log(const std::string& path) {
  constexpr int kNewOrOwn = O_CREAT | O_NOFOLLOW | O_NONBLOCK;
  FileDescriptor log(open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | kNewOrOwn, 0644));
  struct stat info {};
  if (log.open() && fstat(log.get(), &info) == 0 && S_ISREG(info.st_mode)) return log;
  const char* const why = log.open() || errno == ENXIO ? "it is no regular file"
                          : errno == ELOOP             ? "it is a symbolic link, which is not followed"
                                                       : std::strerror(errno);
  throw IoError(text("cannot write ", path, ": ", why));
}

// LibTorch's exceptions say where they come from after what they say.
bool is_of_stack(const std::string& line) {
  return line.starts_with("frame #") || line.starts_with("Exception raised from ");
}

}  // namespace

Child::Child(ChildCommand command) : command_(std::move(command)) {
  if (!command_.log_file.empty()) log_ = open_log(command_.log_file);
  Pipe out, error, problem;
  auto arguments = command_.command;
  auto environment = with(command_.environment);
  const auto raw_arguments = pointers_to(arguments), raw_environment = pointers_to(environment);
  FileDescriptor input;
  const auto their_input = input_of(command_.input, input);
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ < 0) throw ClusterError(text("cannot start a process: ", std::strerror(errno)));
  if (pid_ == 0) {
    become(const_cast<char**>(raw_arguments.data()), const_cast<char**>(raw_environment.data()), their_input.get(),
           out.in.get(), error.in.get(), problem.in.get(), launcher);
  }
  setpgid(pid_, pid_);
  problem.in = FileDescriptor();
  int reason = 0;
  if (::read(problem.out.get(), &reason, sizeof reason) == sizeof reason) {
    waitpid(pid_, nullptr, 0);
    throw ClusterError(text("cannot run ", arguments[0], ": ", std::strerror(reason)));
  }
  {
    MutexLock lock(mutex_);
    input_ = std::move(input);
  }
  fcntl(out.out.get(), F_SETFL, O_NONBLOCK);
  fcntl(error.out.get(), F_SETFL, O_NONBLOCK);
  streams_[0] = {std::move(out.out), Lines(command_.redraws)};
  streams_[1].socket = std::move(error.out);
}

bool Child::read(Stream stream, const Lines::Take& print) {
  auto& channel = streams_[static_cast<int>(stream)];
  auto& last = stream == Stream::error ? last_error_ : last_line_;
  const auto take = [&](const std::string& line, bool is_replaced) {
    if (is_replaced) return print(line, true);
    const auto whole = line + "\n";
    if (log_.open() && write(log_.get(), whole.data(), whole.size()) != static_cast<ssize_t>(whole.size())) {
      log_problem_ = text("cannot write ", command_.log_file, ": ", std::strerror(errno));
      log_ = FileDescriptor();
    }
    if (!line.empty() && !is_of_stack(line)) last = line;
    if (stream != Stream::error || !obey(line)) print(line, false);
  };
  char bytes[16384];
  if (!channel.socket.open()) return false;
  const auto count = ::read(channel.socket.get(), bytes, sizeof bytes);
  if (count > 0) {
    channel.lines.add(bytes, static_cast<std::size_t>(count), take);
  } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
    channel.lines.finish(take);
    channel.socket = FileDescriptor();
  }
  return count > 0;
}

bool Child::reap(const std::function<void(pid_t)>& before_its_number_is_free) {
  const bool had_ended = ended_;
  if (reported_status_ && !ended_) {
    ended_ = true;
    status_ = *reported_status_;
  }
  siginfo_t info{};
  if (is_gone_ || waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
    return ended_ && !had_ended;
  is_gone_ = true;
  ::kill(-pid_, SIGKILL);  // processes that it left, while its process id is still reserved
  before_its_number_is_free(pid_);
  waitpid(pid_, nullptr, 0);
  if (std::exchange(ended_, true)) return !had_ended;
  signal_ = info.si_code == CLD_EXITED ? 0 : info.si_status;
  status_ = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
  return true;
}

std::string Child::how_it_ended() const {
  const auto& words = last_error_.empty() ? last_line_ : last_error_;
  const auto begin = words.find_first_not_of(' ');
  const auto said = begin == std::string::npos ? std::string() : ": " + words.substr(begin);
  if (signal_ == 0) return text(name(), " ended with status ", status_, said);
  return text(name(), " was ended by signal ", signal_, " (", strsignal(signal_), ")",
              signal_ == SIGABRT ? said : std::string());  // of an exception that nobody caught
}

// True where the line is another launcher's message, and no output of its ranks.
bool Child::obey(const std::string& line) {
  if (!is_launcher()) return false;
  const auto message = line + "\n";
  if (message.ends_with(kPartIsHereMessage)) {  // a shell may have printed something before
    if (is_to_end_) return true;
    has_begun_ = true;
    send_message(kBegin);
    return true;
  }
  if (message == kNobodyIsLeftMessage) return found_nobody_ = true;
  if (const auto status = status_in(line)) {
    if (command_.holds_store) reported_status_ = *status;
    return ranks_have_ended_ = true;
  }
  if (command_.holds_store || !line.starts_with(kReport)) return false;
  if (report_.empty()) report_ = line;
  return true;
}

void Child::leave() {
  was_told_to_leave_ = true;
  if (is_launcher()) return send_message(kLeave);
  send(SIGTERM);
}

void Child::reassure() { send_message(kAlive); }

void Child::send(int signal) {
  is_to_end_ = true;
  if (is_launcher()) return send_message(signal_message(signal));
  if (!is_gone_) ::kill(-pid_, signal);
}

void Child::end() {
  is_to_end_ = true;
  if (is_launcher()) return send_message(kEnd);
  send(SIGTERM);
}

bool Child::kill() {
  is_to_end_ = true;
  {
    MutexLock lock(mutex_);
    const bool tells = input_.open() && say(input_, signal_message(SIGKILL));
    input_ = FileDescriptor();  // ssh passes on what it has got, and its end
    if (tells) return is_gone_;
  }
  if (!is_gone_) ::kill(-pid_, SIGKILL);
  return true;
}

// A message that the child does not read is dropped.
void Child::send_message(const std::string& line) {
  MutexLock lock(mutex_);
  if (input_.open()) say(input_, line);
}

}  // namespace lockstep::launch
