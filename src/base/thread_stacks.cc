#include "base/thread_stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/mutex.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr int kMostFrames = 48, kOwnFrames = 2;  // the handler, and what the system calls it from
constexpr int kToAnswerSeconds = 1;

// The handler of the asked thread writes to this. A late handler finds that another thread is asked, or none.
struct Answer {
  std::atomic<int> asked{0};  // the thread
  std::array<void*, kMostFrames> frames{};
  int count = 0;
  sem_t given{};
};
Answer& answer() {
  static Answer shared;
  return shared;
}

void give_frames(int) {
  const int saved = errno;
  auto& shared = answer();
  int self = static_cast<int>(syscall(SYS_gettid));
  if (shared.asked.compare_exchange_strong(self, 0)) {
    shared.count = backtrace(shared.frames.data(), kMostFrames);
    sem_post(&shared.given);
  }
  errno = saved;
}

std::string name_of_frame(void* frame) {
  Dl_info info{};
  if (dladdr(frame, &info) == 0 || info.dli_fname == nullptr) return text(frame);
  const auto library = std::filesystem::path(info.dli_fname).filename().string();
  const auto offset = static_cast<const char*>(frame) - static_cast<const char*>(info.dli_fbase);
  const auto place = text(library, "+0x", std::hex, offset);
  if (info.dli_sname == nullptr) return place;
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &failed),
                                                         &std::free);
  return text(failed == 0 ? name.get() : info.dli_sname, " (", place, ")");
}

std::string frames_of(int thread, int signal) {
  auto& shared = answer();
  shared.asked = thread;
  if (syscall(SYS_tgkill, getpid(), thread, signal) != 0) return "";
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += kToAnswerSeconds;
  while (sem_timedwait(&shared.given, &until) != 0) {
    if (errno == EINTR) continue;
    int still_asked = thread;
    if (shared.asked.compare_exchange_strong(still_asked, 0)) return "  does not answer\n";
  }  // it is just answering
  std::string lines;
  for (int i = kOwnFrames; i < shared.count; ++i)
    lines += text("  ", name_of_frame(shared.frames[static_cast<std::size_t>(i)]), "\n");
  return lines;
}

}  // namespace

std::string stacks_of_all_threads() {
  static Mutex one_at_a_time;
  MutexLock lock(one_at_a_time);
  void* first = nullptr;
  backtrace(&first, 1);  // the first call allocates memory, which a handler must not
  sem_init(&answer().given, 0, 0);
  const int signal = SIGRTMIN + 7;
  struct sigaction action {};
  action.sa_handler = &give_frames;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
  std::string all;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", failed)) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    const auto thread = std::stoi(entry.path().filename().string());
    all += text("thread ", thread, " (", name, ")\n", frames_of(thread, signal));
  }
  // The handler stays: a thread that did not answer may still get its signal, which would end the process.
  return all;
}

}  // namespace lockstep
