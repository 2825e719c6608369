#include "collective/gpus/rank_of_gpu.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "base/file.h"
#include "base/process.h"
#include "collective/gpus/cuda.h"
#include "collective/gpus/nccl.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::gpus {
namespace {

std::string this_boot() {
  constexpr std::size_t kMost = 64;
  auto id = read_small_file("/proc/sys/kernel/random/boot_id", kMost);
  std::erase(id, '\n');
  return id;
}

bool may_share_gpus() {
  const char* const enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return enabled != nullptr && enabled == std::string("1");
}

}  // namespace

RankOfGpu this_rank(int rank, int device) {
  RankOfGpu mine;
  mine.host = text(name_of_this_host(), " ", this_boot());
  try {
    mine.gpu = pci_address(device);
    mine.version = nccl().version;
    NcclId id;
    if (rank == 0) require_nccl(nccl().ncclGetUniqueId(&id), "ncclGetUniqueId");
    mine.id.assign(id.bytes.begin(), id.bytes.end());
  } catch (const Error& error) {
    mine.problem = error.what();
    std::replace(mine.problem.begin(), mine.problem.end(), RankOfGpu::kBetween, ' ');
  }
  return mine;
}

std::string problem_of(const std::vector<RankOfGpu>& ranks) {
  std::map<std::pair<std::string, std::string>, std::size_t> first_on;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto& rank = ranks[r];
    if (!rank.problem.empty()) return text("rank ", r, ": ", rank.problem);
    if (rank.version != ranks[0].version) {
      return text("rank 0 has NCCL ", name_of_version(ranks[0].version), ", rank ", r, " has ",
                  name_of_version(rank.version));
    }
    const auto [first, is_first] = first_on.try_emplace({rank.host, rank.gpu}, r);
    if (is_first || (may_share_gpus() && rank.version >= kFirstNcclWithSharedGpus)) continue;
    return text("ranks ", first->second, " and ", r, " use one GPU, ", rank.gpu, " of host ",
                rank.host.substr(0, rank.host.find(' ')), "; give each rank a GPU of its own, or let NCCL ",
                name_of_version(kFirstNcclWithSharedGpus), " or newer share it by NCCL_MULTI_RANK_GPU_ENABLE=1");
  }
  return "";
}

}  // namespace lockstep::collective::gpus
