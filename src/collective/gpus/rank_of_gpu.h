// How ranks find out whether NCCL can connect their GPUs.
#pragma once

#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"

namespace lockstep::collective::gpus {

// Ranks tell each other this before their first call on a GPU.
struct RankOfGpu {
  std::string host, gpu;  // the host's name and boot, and the GPU's PCI address
  int version = 0;        // of NCCL; 0 where there is none
  std::string problem;    // why it cannot use NCCL
  std::string id;         // of rank 0: NCCL's, by which all meet; any bytes

  static constexpr char kBetween = '\n';
  std::string words() const { return text(host, kBetween, gpu, kBetween, version, kBetween, problem, kBetween, id); }
  static RankOfGpu of(const std::string& words) {
    std::istringstream lines(words);
    RankOfGpu rank;
    std::string version;
    std::getline(lines, rank.host);
    std::getline(lines, rank.gpu);
    std::getline(lines, version);
    std::getline(lines, rank.problem);
    rank.id.assign(std::istreambuf_iterator<char>(lines), {});
    rank.version = std::atoi(version.c_str());
    return rank;
  }
};

RankOfGpu this_rank(int rank, int device);

// Says why these ranks cannot use NCCL; empty where they can.
std::string problem_of(const std::vector<RankOfGpu>& ranks);

}  // namespace lockstep::collective::gpus
