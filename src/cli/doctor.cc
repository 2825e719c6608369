#include "cli/commands.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <ostream>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/version.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/collective/make_group.h"
#include "lockstep/elastic/job.h"

namespace lockstep::cli {

// A process finds these out about its environment.
struct Facts {
  std::string host, version;
  std::vector<int> cores;
  int usable_cores = 0;  // of them, as many as the control group's CPU quota allows
  int ranks_here = 0;
  double memory_gib = 0;
  int gpus = 0;
  std::string shared_memory;  // what is wrong with it
  double clock_ahead_s = 0;   // of rank 0's
  double round_trip_us = 0;   // to rank 0
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Facts, host, version, cores, usable_cores, ranks_here, memory_gib, gpus,
                                   shared_memory, clock_ahead_s, round_trip_us)

namespace {

constexpr int kQuestions = 20;
constexpr double kClocksApart = 0.5;  // seconds; logs and certificates are compared by people and machines
constexpr std::size_t kProbe = 1 << 20;
constexpr double kGib = 1 << 30;

constexpr double kSoonSeconds = 30;
Deadline soon() { return Deadline::after(std::chrono::duration<double>(kSoonSeconds)); }

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// Processes of one host share anonymous files in memory.
std::string problem_with_shared_memory() {
  const int file = memfd_create("lockstep doctor", MFD_CLOEXEC);
  std::string problem;
  if (file < 0 || ftruncate(file, kProbe) != 0) problem = std::strerror(errno);
  void* const memory =
      problem.empty() ? mmap(nullptr, kProbe, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  if (problem.empty() && memory == MAP_FAILED) problem = std::strerror(errno);
  if (memory != MAP_FAILED) {
    std::memset(memory, 1, kProbe);
    munmap(memory, kProbe);
  }
  if (file >= 0) close(file);
  return problem;
}

int gpus_of_this_machine() {
  int count = 0;
  while (std::filesystem::exists(text("/dev/nvidia", count))) ++count;
  return count;
}

// Rank 0 asks each rank for its time, one after the other; the quickest answer is the most exact.
void compare_clocks(const Group& group, Facts& mine) {
  double answer[2] = {};
  const auto buffer = [&] { return buffer_of(std::span(answer)); };
  for (int other = 1; other < group.size(); ++other) {
    if (group.rank() != 0 && group.rank() != other) continue;
    double quickest = 1e9, ahead = 0;
    for (int i = 0; i < kQuestions; ++i) {
      if (group.rank() == other) {
        group.recv(buffer(), 0, soon());
        answer[0] = now();
        group.send(buffer(), 0, soon());
        continue;
      }
      const double asked = now();
      group.send(buffer(), other, soon());
      group.recv(buffer(), other, soon());
      const double answered = now();
      if (answered - asked >= quickest) continue;
      quickest = answered - asked;
      ahead = answer[0] - (asked + answered) / 2;
    }
    if (group.rank() == 0) {
      answer[0] = ahead;
      answer[1] = quickest;
      group.send(buffer(), other, soon());
    } else {
      group.recv(buffer(), 0, soon());
      mine.clock_ahead_s = answer[0];
      mine.round_trip_us = answer[1] * 1e6;
    }
  }
}

std::vector<Facts> gather(const Communicator& ranks, const Facts& mine) {
  std::vector<Facts> facts;
  for (const auto& theirs : ranks.all_gather(nlohmann::json(mine).dump())) {
    facts.push_back(nlohmann::json::parse(theirs).get<Facts>());
  }
  return facts;
}

// Returns each problem, and what to do about it.
std::vector<std::string> problems_of(const std::vector<Facts>& all) {
  std::vector<std::string> problems;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto& facts = all[rank];
    const auto who = text("rank ", rank, " on ", facts.host);
    if (facts.version != all[0].version) {
      problems.push_back(
          text(who, " has Lockstep ", facts.version, ", rank 0 has ", all[0].version, ": install the same everywhere"));
    }
    if (!facts.shared_memory.empty()) {
      problems.push_back(text(who, " cannot share memory (", facts.shared_memory,
                              "): allow memfd_create, or use CommunicationOptions{.backend = \"tcp\"}"));
    }
    const int cores = std::min(static_cast<int>(facts.cores.size()), facts.usable_cores);
    if (cores < facts.ranks_here && facts.gpus == 0) {
      problems.push_back(text(who, " shares ", cores, " core(s) with ", facts.ranks_here - 1,
                              " other(s): start fewer processes there, or give the job more cores"));
    }
    if (facts.usable_cores < static_cast<int>(facts.cores.size())) {
      problems.push_back(text(who, " may run on ", facts.cores.size(), " cores, and its control group allows ",
                              facts.usable_cores, " (cpu.max): raise it, or bind the job to as many cores"));
    }
    if (std::abs(facts.clock_ahead_s) > kClocksApart) {
      problems.push_back(text("the clock of ", facts.host, " is ", std::abs(facts.clock_ahead_s), " s ",
                              facts.clock_ahead_s > 0 ? "ahead of" : "behind",
                              " rank 0's: synchronize it (chrony, ntpd)"));
    }
  }
  return problems;
}

void print(const std::vector<Facts>& all, std::ostream& out) {
  out << "rank  cores  usable    memory     GPUs  round trip  clock       host\n" << std::fixed;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto& facts = all[rank];
    out << std::left << std::setw(6) << rank << std::setw(7) << facts.cores.size() << std::setw(10)
        << facts.usable_cores << std::setw(11) << text(std::llround(facts.memory_gib), " GiB") << std::setw(6)
        << facts.gpus << std::setw(12) << (rank == 0 ? "-" : text(std::llround(facts.round_trip_us), " us"))
        << std::setw(12) << (rank == 0 ? "-" : text(std::showpos, std::llround(facts.clock_ahead_s * 1e3), " ms"))
        << facts.host << "\n";
  }
}

}  // namespace

int examine(const Cluster& cluster, std::ostream& out) {
  const Job job(cluster, kSoonSeconds);
  // TCP even between processes of one host, because the links are to be checked too.
  const auto group = job.group({.backend = "tcp", .timeout_seconds = kSoonSeconds});
  Facts mine{.host = name_of_this_host(),
             .version = version(),
             .cores = allowed_cpus(),
             .usable_cores = usable_cpu_count(),
             .ranks_here = job.world().local_size,
             .memory_gib = static_cast<double>(usable_memory_bytes()) / kGib,
             .gpus = gpus_of_this_machine(),
             .shared_memory = problem_with_shared_memory()};
  compare_clocks(group, mine);
  const auto all = gather({group, kSoonSeconds}, mine);
  const auto problems = problems_of(all);
  if (group.rank() == 0) {
    print(all, out);
    for (const auto& problem : problems) out << "PROBLEM: " << problem << "\n";
    if (problems.empty() && all.size() > 1) out << "all " << all.size() << " processes reach each other; ";
    if (problems.empty()) out << "a job can run here\n";
  }
  return problems.empty() || group.rank() != 0 ? 0 : 1;
}

}  // namespace lockstep::cli
