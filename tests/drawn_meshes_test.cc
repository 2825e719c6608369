// LibTorch loops on meshes, drawn by seeds: each computes what a plain loop of LibTorch in one process does, or throws
// on every rank.
#include "drawn_mesh_rank.h"
#include "drawn_ranks.h"

namespace lockstep {
namespace {

Values part_of_plain(const MeshRank& rank, const Plain& plain, const Values& found) {
  auto values = rank.expected(plain);
  std::erase_if(values, [&](const auto& each) { return !found.contains(each.first); });
  return values;
}

DrawnResult run_mesh_loop(std::uint64_t seed) {
  const auto loop = draw_mesh_loop(seed);
  DrawnResult result{.program = loop.text()};
  std::optional<Plain> exact, plain;
  std::string refused_by_libtorch;
  try {
    exact = PlainLoop(loop, at::kDouble).run();
    if (loop.in_16_bits()) plain = PlainLoop(loop, loop.net.dtype).run();
  } catch (const c10::Error& error) {
    refused_by_libtorch = error.what_without_backtrace();
  }
  std::vector<std::string> wrong(static_cast<std::size_t>(loop.ranks()));
  const auto ended = on_drawn_ranks(loop.ranks(), loop.is_wrong(), [&](const Group& group) {
    const DeviceMesh mesh(loop.axes, {group, kTimeoutSeconds});
    mesh.ranks().group().barrier(mesh.ranks().deadline());  // before it none hears of what another one throws
    std::optional<MeshRank> rank;
    Values found;
    mesh.ranks().abort_on_error([&] {
      rank.emplace(loop, mesh);
      found = rank->run();
    });
    auto& says = wrong[static_cast<std::size_t>(group.rank())];
    if (!exact) {
      says = "was computed, where LibTorch says: " + refused_by_libtorch;
      return;
    }
    const auto expected = part_of_plain(*rank, *exact, found);
    says = plain ? differences_in_16_bits(found, expected, part_of_plain(*rank, *plain, found))
                 : differences(found, expected);
  });
  result.refused = ended.refused;
  result.wrong = ended.wrong;
  for (std::size_t i = 0; i < wrong.size() && !ended.refused && result.wrong.empty(); ++i) {
    if (!wrong[i].empty()) result.wrong = text("rank ", i, ": ", wrong[i]);
  }
  return result;
}

// Failed once, and run always.
const std::vector<std::uint64_t> kKept{
    17,    // recompute doubled the gradients of a layer that is registered twice
    92,    // average_gradients gave shards the mean of other ranks' places
    230,   // pipelines over shards, with other numbers of microbatches, waited for each other
    275,   // the balance of recomputed experts had no gradient
    627,   // SequenceParallel of a layer with whole inputs multiplied gradients
    790,   // of the first layer too, before experts
    808,   // a whole parameter could not be watched twice
    1382,  // recompute of a module that uses no parameter broke backward
    2658,  // ReplicateParallel of an operator that is no linear layer multiplied the bias's gradient
    3336,  // a plan of SequenceParallel alone left partial gradients
    4443,  // SequenceParallel of a tied head multiplied the bias's gradient
};

TEST(DrawnMeshes, LoopsComputeAsOneProcessOrAreRefused) {
  at::set_num_threads(1);
  std::map<std::string, int> due;  // refusals of what is wrong on purpose
  check_drawn_programs(kKept, 4, 1.0 / 3, [&](std::uint64_t seed) {
    auto result = run_mesh_loop(seed);
    if (result.refused && draw_mesh_loop(seed).is_wrong()) {
      ++due[result.refused->substr(0, 120)];
      result.refused.reset();
    }
    return result;
  });
  for (const auto& [why, count] : due) std::cout << "  wrong on purpose: " << count << " x " << why << "\n";
}

}  // namespace
}  // namespace lockstep
