// Elastic trainings on meshes: the rows that remain go on when a rank of another one is lost.
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <string>
#include <vector>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "tests/elastic_job.h"

namespace lockstep {
namespace {

constexpr int kSteps = 60;  // of three epochs

// Weights, and losses and metrics of each epoch.
struct Outcome {
  std::vector<std::vector<double>> weights, history;  // of each process that has ended well
};

Outcome outcome_of(const std::string& output) {
  return {numbers_after(output, text("steps ", kSteps, ", weights")), numbers_after(output, "history")};
}

struct Mesh {
  const char* name;
  const char* axes;  // of ...
  int ranks, row;    // ... so many ranks, of which so many have a copy of the model together
  bool shards_state = false;
};

void PrintTo(const Mesh& mesh, std::ostream* out) { *out << mesh.name; }

class ElasticMesh : public testing::TestWithParam<Mesh> {
 protected:
  static Outcome alone(bool clips) {
    auto job = elastic_job(ELASTIC_PROGRAM, {weights_of("alone"), text("CLIP=", clips ? 1 : 0)}, 0, 0);
    const auto outcome = outcome_of(job.wait_for_end(60));
    if (outcome.weights.size() != 1) throw Error(job.text());
    return outcome;
  }
  static const Outcome& expected(bool clips) {
    static const auto plain = alone(false), clipped = alone(true);
    return clips ? clipped : plain;
  }
  static std::string weights_of(const std::string& name) {
    return text("WEIGHTS=", (fresh_folder("elastic_mesh", name) / "weights").string());
  }

  static Process run(std::vector<std::string> variables, const std::string& test) {
    const auto& mesh = GetParam();
    variables.insert(variables.end(), {text("MESH=", mesh.axes), text("SHARD=", mesh.shards_state ? 1 : 0),
                                       weights_of(text(mesh.name, "_", test))});
    return elastic_job(ELASTIC_PROGRAM, variables, mesh.ranks, 1);
  }

  static void expect_trained(Process& job, int survivors, bool clips, bool compares_history = true) {
    const auto& output = job.wait_for_end(60);
    const auto found = outcome_of(output);
    EXPECT_EQ(static_cast<int>(found.weights.size()), survivors) << output;
    for (const auto& one : found.weights) EXPECT_LE(difference(one, expected(clips).weights[0]), 1e-9) << output;
    if (!compares_history) return;
    for (const auto& one : found.history) EXPECT_LE(difference(one, expected(clips).history[0]), 1e-9) << output;
  }
};

TEST_P(ElasticMesh, TheOtherRowsGoOn) {
  const auto& mesh = GetParam();
  for (const int victim : {0, mesh.ranks - 1}) {
    SCOPED_TRACE(testing::Message() << "rank " << victim);
    auto job = run({text("VICTIM=", victim), "STEP=25", "PLACE=forward", "CLIP=1"}, "rows");
    expect_trained(job, mesh.ranks - mesh.row, true);
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, ElasticMesh,
                         testing::Values(Mesh{"data3", "data 3", 3, 1}, Mesh{"data3_sharded", "data 3", 3, 1, true},
                                         Mesh{"data2_tensor2", "data 2 tensor 2", 4, 2},
                                         Mesh{"data3_tensor2_sharded", "data 3 tensor 2", 6, 2, true},
                                         Mesh{"data2_shard2", "data 2 shard 2", 4, 2},
                                         Mesh{"data2_pipeline2", "data 2 pipeline 2", 4, 2}),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace lockstep
