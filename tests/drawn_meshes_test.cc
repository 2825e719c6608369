// LibTorch loops on meshes, drawn by seeds: each computes what a plain loop of LibTorch in one process does, or throws
// on every rank.
#include "drawn_mesh_rank.h"
#include "drawn_mesh_run.h"

namespace lockstep {
namespace {

DrawnResult run_mesh_loop(std::uint64_t seed) {
  const auto loop = draw_mesh_loop(seed);
  std::optional<Plain> exact, plain;
  std::string refused_by_libtorch;
  try {
    exact = PlainLoop(loop, at::kDouble).run();
    if (loop.in_16_bits()) plain = PlainLoop(loop, loop.net.dtype).run();
  } catch (const c10::Error& error) {
    refused_by_libtorch = error.what_without_backtrace();
  }
  const auto weights = exact ? exact->weights : Values();
  return run_on_drawn_mesh(loop, loop.text(), weights, refused_by_libtorch, [&](const DeviceMesh& mesh) {
    MeshRank rank(loop, mesh);
    MeshRankEnd end{rank.run(), {}};
    if (exact) end.exact = rank.expected(*exact);
    if (plain) end.plain = rank.expected(*plain);
    return end;
  });
}

// Failed once, and run always.
const std::vector<KeptSeed> kKept{
    {17},                            // recompute doubled the gradients of a layer that is registered twice
    {92},                            // average_gradients gave shards the mean of other ranks' places
    {230},                           // pipelines over shards, with other numbers of microbatches, waited for each other
    {275, KeptSeed::Ends::refused},  // the balance of recomputed experts had no gradient
    {627, KeptSeed::Ends::refused},  // SequenceParallel of a layer with whole inputs multiplied gradients
    {790, KeptSeed::Ends::refused},  // of the first layer too, before experts
    {808},                           // a whole parameter could not be watched twice
    {1382},                          // recompute of a module that uses no parameter broke backward
    {2658, KeptSeed::Ends::refused},  // ReplicateParallel of an operator that is no linear layer multiplied the bias's
                                      // gradient
    {3336, KeptSeed::Ends::refused},  // a plan of SequenceParallel alone left partial gradients
    {4443, KeptSeed::Ends::refused},  // SequenceParallel of a tied head multiplied the bias's gradient
};

TEST(DrawnMeshes, LoopsComputeAsOneProcessOrAreRefused) {
  at::set_num_threads(1);
  check_drawn_programs(kKept, 4, 0.1, run_mesh_loop);
}

}  // namespace
}  // namespace lockstep
