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

  static Process run(std::vector<std::string> variables, const std::string& test, int restarts = 0) {
    const auto& mesh = GetParam();
    // The weights are those of the chief's row; that the other rows have the same bits is compared in the training.
    variables.insert(variables.end(),
                     {text("MESH=", mesh.axes), "COMPARE=10", text("SHARD=", mesh.shards_state ? 1 : 0),
                      weights_of(text(mesh.name, "_", test))});
    return elastic_job(ELASTIC_PROGRAM, variables, mesh.ranks, 1, restarts);
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

// A rank is lost in a step or between two, and sometimes another one while the others regroup.
TEST_P(ElasticMesh, RanksMayBeLostAtAnyMoment) {
  const auto& mesh = GetParam();
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 2 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
    const int victim = below(mesh.ranks), microseconds = below(4000);
    const bool clips = seed % 2 == 0, second = seed % 2 == 1 && mesh.ranks / mesh.row > 2;
    const auto name = text("moment_", seed);
    std::vector<std::string> variables{text("VICTIM=", victim), text("STEP=", 4 + below(kSteps - 4)),
                                       text("PLACE=", microseconds), text("CLIP=", clips ? 1 : 0),
                                       text("FOLDER=", fresh_folder("elastic_mesh_backup", mesh.name + name).string())};
    if (second) {
      variables.push_back(text("SECOND=", (victim + 1 + below(mesh.ranks - 1)) % mesh.ranks));
      variables.push_back(text("SECOND_US=", microseconds + below(8000)));
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << join(variables, " "));
    auto job = run(variables, name);
    const auto lost = numbers_after(job.wait_for_end(60), "ended by signal").size();
    const auto left = numbers_after(job.text(), "] failed: regroup: rank").size();
    EXPECT_EQ((lost + left) % static_cast<std::size_t>(mesh.row), 0U) << job.text();
    expect_trained(job, mesh.ranks - static_cast<int>(lost + left), clips, /*compares_history=*/false);
  }
}

TEST_P(ElasticMesh, ARowThatIsToldToEndLeaves) {
  const auto& mesh = GetParam();
  auto job = run({"STEP_MS=20", text("VICTIM=", mesh.ranks - 1), "STEP=10", "PLACE=print"}, "told");
  const int told = process_of(job, mesh.row > 1 ? 1 : 0);
  job.wait_for("step 10", 30);
  kill(told, SIGTERM);
  expect_trained(job, mesh.ranks - mesh.row, false);
  for (int rank = 0; rank < mesh.row; ++rank)
    EXPECT_NE(job.text().find(text("[", rank, "] left\n")), std::string::npos) << job.text();
}

INSTANTIATE_TEST_SUITE_P(Meshes, ElasticMesh,
                         testing::Values(Mesh{"data3_sharded", "data 3", 3, 1, true},
                                         Mesh{"data2_tensor2_sharded", "data 2 tensor 2", 4, 2, true},
                                         Mesh{"data3_tensor2_sharded", "data 3 tensor 2", 6, 2, true},
                                         Mesh{"data3_shard2", "data 3 shard 2", 6, 2},
                                         Mesh{"data3_pipeline2", "data 3 pipeline 2", 6, 2},
                                         Mesh{"data2_shard2_tensor2", "data 2 shard 2 tensor 2", 8, 4}),
                         [](const auto& each) { return each.param.name; });

// All ranks of the row are started again.
TEST_P(ElasticMesh, ANewRowIsTakenIn) {
  const auto& mesh = GetParam();
  auto job = run({text("VICTIM=", mesh.ranks - 1), "STEP=5", "PLACE=forward", "STEP_MS=50"}, "new", mesh.row);
  expect_trained(job, mesh.ranks, false);
  EXPECT_NE(job.text().find(text("fit goes on with ", mesh.ranks, " workers (", mesh.ranks - mesh.row, " before)")),
            std::string::npos)
      << job.text();
}

class MeshesOfTwoRows : public ElasticMesh {};

// Newcomers load the weights that the others have, and those of a second model.
TEST_P(MeshesOfTwoRows, NewcomersRunTheProgramFromItsBeginning) {
  const auto weights = (fresh_folder("elastic_mesh", "begin") / "weights").string();
  auto first = elastic_job(ELASTIC_PROGRAM, {"WEIGHTS=" + weights}, 0, 0);
  first.wait_for_end(60);
  const auto loaded = fresh_folder("elastic_mesh", "loaded") / "weights";
  auto alone = elastic_job(ELASTIC_PROGRAM, {"LOAD=" + weights, "WEIGHTS=" + loaded.string()}, 0, 0);
  const auto expected_weights = outcome_of(alone.wait_for_end(60)).weights.at(0);
  auto job = run({"LOAD=" + weights, text("VICTIM=", GetParam().ranks - 1), "STEP=5", "PLACE=forward", "STEP_MS=50"},
                 "begin", GetParam().row);
  const auto found = outcome_of(job.wait_for_end(60));
  EXPECT_EQ(static_cast<int>(found.weights.size()), GetParam().ranks) << job.text();
  for (const auto& one : found.weights) EXPECT_LE(difference(one, expected_weights), 1e-9) << job.text();
}

TEST_P(MeshesOfTwoRows, TwoModelsGoOn) {
  auto job = run({"MODELS=2", "VICTIM=0", "STEP=25", "PLACE=forward", "CLIP=1"}, "two_models");
  expect_trained(job, GetParam().ranks - GetParam().row, true);
  EXPECT_EQ(static_cast<int>(numbers_after(job.text(), "second").size()), GetParam().ranks - GetParam().row)
      << job.text();
}

// Newcomers get the buffers of their own part.
TEST_P(MeshesOfTwoRows, NewcomersGetBuffersToo) {
  const auto& mesh = GetParam();
  auto job =
      run({"NORM=1", text("VICTIM=", mesh.ranks - 1), "STEP=5", "PLACE=forward", "STEP_MS=30"}, "buffers", mesh.row);
  const auto found = outcome_of(job.wait_for_end(60));
  EXPECT_EQ(static_cast<int>(found.history.size()), mesh.ranks) << job.text();
}

// One row loses the rank with part 0, the other one that with part 1.
TEST_P(MeshesOfTwoRows, RowsThatHaveLostDifferentPartsArePutTogether) {
  auto job = run({"VICTIM=0", "KILL_ALSO=3", "STEP=25", "PLACE=forward"}, "together");
  expect_trained(job, 2, false);
}

TEST_P(MeshesOfTwoRows, WhereNoRowIsLeftItSaysSo) {
  auto job = run({"VICTIM=0", "KILL_ALSO=2", "STEP=25", "PLACE=forward"}, "none");
  const auto& output = job.wait_for_end(60);
  EXPECT_FALSE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  EXPECT_NE(output.find("no whole copy of the model, of 2 ranks, is left"), std::string::npos) << output;
}

INSTANTIATE_TEST_SUITE_P(Meshes, MeshesOfTwoRows,
                         testing::Values(Mesh{"data2_tensor2", "data 2 tensor 2", 4, 2},
                                         Mesh{"data2_pipeline2", "data 2 pipeline 2", 4, 2},
                                         Mesh{"data2_shard2", "data 2 shard 2", 4, 2}),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace lockstep
