// TPUStrategy on a pod of two hosts, each a process, with a plugin whose chips are CPUs (pod_pjrt_plugin.cc).
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "base/text.h"
#include "tests/elastic_job.h"
#include "tests/tpu_pod_training.h"

namespace lockstep {
namespace {

constexpr double kLongest = 240;  // seconds, of a process

// Two processes of tpu_pod_program, as GKE would start them on two hosts.
std::vector<Process> pod(const std::string& act, const std::vector<std::string>& variables) {
  std::vector<Process> hosts;
  for (int id = 0; id < 2; ++id) {
    std::vector<std::string> command{"/usr/bin/env", "TPU_WORKER_HOSTNAMES=127.0.0.1,localhost",
                                     text("TPU_WORKER_ID=", id), text("PJRT_PLUGIN_LIBRARY_PATH=", POD_PLUGIN)};
    command.insert(command.end(), variables.begin(), variables.end());
    command.insert(command.end(), {TPU_POD_PROGRAM, act});
    hosts.emplace_back(command);
  }
  return hosts;
}

std::vector<std::string> outputs(const std::string& act, const std::vector<std::string>& variables = {}) {
  std::vector<std::string> printed;
  auto hosts = pod(act, variables);
  for (auto& host : hosts) printed.push_back(host.wait_for_end(kLongest));
  return printed;
}

std::vector<double> numbers(const std::string& output, const std::string& word) {
  const auto lines = numbers_after("\n" + output, word + " ");
  return lines.empty() ? std::vector<double>() : lines[0];
}

const std::vector<std::string>& trained() {
  static const auto printed = outputs("train");
  return printed;
}

TEST(TpuPod, TrainsAsMirroredDoes) {
  const auto& printed = trained();
  const MirroredStrategy mirrored(4);
  const std::vector<std::pair<std::string, std::vector<double>>> expected{{"fit", numbers_of_fit(mirrored, 1)},
                                                                          {"launches", numbers_of_fit(mirrored, 3)},
                                                                          {"loop", numbers_of_loop(mirrored)}};
  for (const auto& output : printed) {
    EXPECT_EQ(numbers(output, "topology"), (std::vector<double>{4, 2, 4, 2})) << output;
    for (const auto& [word, values] : expected) {
      const auto found = numbers(output, word);
      ASSERT_EQ(found.size(), values.size()) << output;
      for (std::size_t i = 0; i < values.size(); ++i)
        EXPECT_NEAR(found[i], values[i], 1e-4 * std::max(1.0, std::abs(values[i]))) << word << " " << i;
      EXPECT_EQ(found, numbers(printed[0], word));
    }
    const auto unequal = numbers(output, "unequal");
    EXPECT_EQ(unequal.size(), 2) << output;
    EXPECT_EQ(unequal, numbers(printed[0], "unequal"));
  }
}

// The bits are those of a training that was not broken off. The second time uses programs that were kept.
TEST(TpuPod, GoesOnFromItsBackup) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "tpu_pod_test";
  std::filesystem::remove_all(folder);
  const std::vector<std::string> variables{text("BACKUPS=", (folder / "backups").string()),
                                           text("LOCKSTEP_CACHE=", (folder / "programs").string())};
  for (const auto& output : outputs("break off", variables))
    EXPECT_NE(output.find("preempted"), std::string::npos) << output;
  for (const auto& output : outputs("go on", variables)) {
    EXPECT_EQ(numbers(output, "fit"), numbers(trained()[0], "fit")) << output;
    EXPECT_EQ(numbers(output, "compiled"), std::vector<double>{2}) << output;  // of evaluate and predict, for all data
  }
}

TEST(TpuPod, HostsThatWouldRunOtherProgramsAreRefused) {
  for (const auto& output : outputs("differ")) {
    EXPECT_NE(output.find("the workers' programs of a step differ: worker 0 has"), std::string::npos) << output;
  }
  for (const auto& output : outputs("differ in rows")) {
    EXPECT_NE(
        output.find("programs of a step differ: worker 0 has inputs Float [2, 3], worker 1 has inputs Float [1, 3]"),
        std::string::npos)
        << output;
  }
  for (const auto& output : outputs("differ in shape")) {
    EXPECT_NE(output.find("they would launch different ones: worker 0 the prediction step of model 1 "),
              std::string::npos)
        << output;
  }
  for (const char* const act : {"differ in order", "differ in learning rate"}) {
    std::string all;
    for (const auto& output : outputs(act)) {
      EXPECT_NE(output.find("they would launch different ones: worker 0 the training step of model "),
                std::string::npos)
          << act << ": " << output;
      all += output;
    }
    if (std::string(act) == "differ in order") {
      EXPECT_NE(all.find("worker 0 the training step of model 1 "), std::string::npos) << all;
      EXPECT_NE(all.find("worker 1 the training step of model 2 "), std::string::npos) << all;
    }
    // The text is whole on a host that found the difference; another's abort may be cut short.
    const bool by_rate = all.find("learning rate 0.5") != std::string::npos;
    EXPECT_EQ(by_rate, std::string(act) == "differ in learning rate") << all;
  }
}

TEST(TpuPod, AHostThatCannotStartSaysSoToTheOthers) {
  const auto printed = outputs("lack a plugin");
  EXPECT_NE(printed[0].find("error there is no PJRT plugin /no/plugin.so"), std::string::npos) << printed[0];
  EXPECT_NE(printed[1].find("rank 0 on 127.0.0.1: there is no PJRT plugin /no/plugin.so"), std::string::npos)
      << printed[1];
}

TEST(TpuPod, ReplicasAreOnAllDevices) {
  for (const auto& output : outputs("be alone")) {
    EXPECT_NE(output.find("this process has 2 of 4 devices, and knows of no process that has the others"),
              std::string::npos)
        << output;
  }
  // These plugins know nothing of each other.
  for (const auto& output : outputs("take two", {text("PJRT_PLUGIN_LIBRARY_PATH=", CPU_PLUGIN)})) {
    EXPECT_NE(output.find("it has not joined the devices of the 2 processes into one TPU"), std::string::npos)
        << output;
  }
  for (const auto& output : outputs("take two")) {
    EXPECT_NE(output.find("it must be 0 or 4, since several processes train together"), std::string::npos) << output;
  }
}

// The other's devices wait for its: the end comes before the plugin gives up, after 60 s.
TEST(TpuPod, AHostThatIsLostEndsTheTraining) {
  const auto began = std::chrono::steady_clock::now();
  const auto printed = outputs("lose one", {"LAST_LAUNCH_OF_HOST_0=5"});
  EXPECT_NE(printed[0].find("error lost rank 1"), std::string::npos) << printed[0];
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(50));
}

TEST(TpuPod, AHostThatFailsTellsTheOthersWhy) {
  const auto began = std::chrono::steady_clock::now();
  const auto printed = outputs("fail on one");
  EXPECT_NE(printed[0].find("the disk is full"), std::string::npos) << printed[0];
  EXPECT_NE(printed[1].find("error the disk is full"), std::string::npos) << printed[1];
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(50));
}

// All programs launched before have ended, so that all hosts can save their weights.
TEST(TpuPod, WhereAHostCannotReadItsDataTheWeightsAreKept) {
  const auto printed = outputs("fail to read on one");
  for (const auto& output : printed) {
    EXPECT_NE(output.find("the file is cut short"), std::string::npos) << output;
    const auto weights = numbers(output, "weights");
    ASSERT_EQ(weights.size(), 2) << output;
    EXPECT_GT(weights[1], 0) << "the bias, which begins with 0";
    EXPECT_EQ(weights, numbers(printed[0], "weights"));
  }
}

// Dropout's masks belong to a replica's number among all.
TEST(TpuPod, ReplicasDrawAsThoseOfOneHost) {
  Process alone({"/usr/bin/env", text("PJRT_PLUGIN_LIBRARY_PATH=", CPU_PLUGIN),
                 "PJRT_PLUGIN_OPTIONS=cpu_device_count=4", TPU_POD_PROGRAM, "train alone"});
  const auto expected = numbers(alone.wait_for_end(kLongest), "dropout");
  EXPECT_FALSE(expected.empty());
  for (const auto& output : trained()) EXPECT_EQ(numbers(output, "dropout"), expected) << output;
}

}  // namespace
}  // namespace lockstep
