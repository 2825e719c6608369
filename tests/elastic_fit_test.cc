// Trainings of three workers, through `lockstep run`, that go on when some of them are lost.
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <fstream>
#include <random>
#include <sstream>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/processes/processes.h"

namespace lockstep {
namespace {

// With these variables of the environment.
Process run(const std::vector<std::string>& variables, int workers, int fewest, int restarts = 0) {
  std::vector<std::string> command{"/usr/bin/env"};
  command.insert(command.end(), variables.begin(), variables.end());
  for (const auto& word :
       {std::string("/bin/sh"), std::string("-c"), std::string("exec \"$@\" 2>&1"), std::string("sh")})
    command.push_back(word);
  if (workers > 0) {
    for (const auto& word : {std::string(LOCKSTEP_CLI), std::string("run"), std::string("-n"), std::to_string(workers),
                             std::string("--min-n"), std::to_string(fewest), std::string("--restarts"),
                             std::to_string(restarts), std::string("--grace"), std::string("1")})
      command.push_back(word);
  }
  command.emplace_back(ELASTIC_PROGRAM);
  return Process(command);
}

// The numbers of the lines that have `word`, in their order: of each worker that has ended well.
std::vector<std::vector<double>> numbers_after(const std::string& output, const std::string& word) {
  std::vector<std::vector<double>> found;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find(word);
    if (at == std::string::npos) continue;
    std::istringstream numbers(line.substr(at + word.size()));
    auto& values = found.emplace_back();
    for (double value = 0; numbers >> value;) values.push_back(value);
  }
  return found;
}

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size() || a.empty()) return INFINITY;
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

// The process of worker `rank`, which it has printed.
int process_of(Process& job, int rank) {
  const auto line = text("[", rank, "] worker at ");
  const auto& printed = job.wait_for_line(line, 30);
  return std::stoi(printed.substr(printed.find(line) + line.size()));
}

constexpr int kEpochs = 3, kSteps = 20 * kEpochs;

class Elastic : public testing::Test {
 protected:
  // What one process without others trains.
  static std::string alone() {
    static const std::string output = [] {
      auto job = run({}, 0, 0);
      return job.wait_for_end(60);
    }();
    return output;
  }

  // All survivors have made all steps, with the weights of a training of one process.
  static void expect_trained(Process& job, int survivors) {
    const auto& output = job.wait_for_end(60);
    EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
    const auto word = text("steps ", kSteps, ", weights");
    const auto expected = numbers_after(alone(), word), got = numbers_after(output, word);
    ASSERT_EQ(expected.size(), 1U) << alone();
    ASSERT_EQ(static_cast<int>(got.size()), survivors) << output;
    for (const auto& weights : got) EXPECT_LE(difference(weights, expected[0]), 1e-9) << output;
    for (const auto& weights : got) EXPECT_EQ(weights, got[0]) << output;
  }
};

TEST_F(Elastic, AStepWithoutALostWorkerIsMadeByTheOthers) {
  for (const int victim : {0, 1, 2}) {
    SCOPED_TRACE(testing::Message() << "worker " << victim);
    auto job = run({text("VICTIM=", victim), "STEP=25", "PLACE=forward"}, 3, 2);
    expect_trained(job, 2);
    EXPECT_NE(job.text().find("fit goes on with 2 workers (3 before)"), std::string::npos) << job.text();
    // Also the losses and metrics of each epoch: nothing that the lost worker had computed is lost.
    const auto histories = numbers_after(job.text(), "history"), expected = numbers_after(alone(), "history");
    for (const auto& history : histories) EXPECT_LE(difference(history, expected.at(0)), 1e-9) << job.text();
  }
}

TEST_F(Elastic, LogsAndCheckpointsGoOnWithTheNextChief) {
  const auto folder = fresh_folder("elastic", "chief");
  auto job = run({"VICTIM=0", "STEP=25", "PLACE=batch end", text("FOLDER=", folder.string())}, 3, 2);
  expect_trained(job, 2);
  std::ifstream log(folder / "log.csv");
  std::vector<std::string> begins;
  for (std::string line; std::getline(log, line);) begins.push_back(line.substr(0, line.find(',')));
  EXPECT_EQ(begins, (std::vector<std::string>{"epoch", "0", "1", "2"}));
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    EXPECT_TRUE(std::filesystem::exists(folder / text("ckpt-", epoch, ".safetensors"))) << epoch;
  }
}

// In all phases of a step, of the agreement behind it, and of the next one.
TEST_F(Elastic, AWorkerMayBeLostAtAnyMoment) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 12 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const int victim = static_cast<int>(random() % 3), step = static_cast<int>(random() % kSteps),
              microseconds = static_cast<int>(random() % 3000);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": worker " << victim << ", " << microseconds
                                    << " us after the forward pass of step " << step);
    auto job = run({text("VICTIM=", victim), text("STEP=", step), text("PLACE=", microseconds)}, 3, 2);
    expect_trained(job, numbers_after(job.wait_for_end(60), "ended by signal").empty() ? 3 : 2);
  }
}

TEST_F(Elastic, AWorkerThatIsStartedAgainJoinsTheOthersInMidEpoch) {
  for (const int victim : {0, 2}) {
    SCOPED_TRACE(testing::Message() << "worker " << victim);
    const auto folder = fresh_folder("elastic", text("joins_", victim));
    auto job = run({text("VICTIM=", victim), "STEP=5", "PLACE=forward", "STEP_MS=50", text("FOLDER=", folder.string())},
                   3, 2, 1);
    expect_trained(job, 3);
    EXPECT_NE(job.text().find("fit goes on with 3 workers (2 before)"), std::string::npos) << job.text();
    const auto joined = numbers_after(job.text(), "joined at step ");
    ASSERT_EQ(joined.size(), 1U) << job.text();
    EXPECT_GT(joined[0][0], 6) << job.text();
    EXPECT_LT(joined[0][0], kSteps) << job.text();
    const auto histories = numbers_after(job.text(), "history"), expected = numbers_after(alone(), "history");
    EXPECT_EQ(histories.size(), 3U) << job.text();
    for (const auto& history : histories) EXPECT_LE(difference(history, expected.at(0)), 1e-9) << job.text();
  }
}

TEST_F(Elastic, AWorkerThatIsToldToEndLeavesBehindItsStep) {
  // The second in the evaluation behind an epoch.
  for (const auto& [leaver, step] : {std::pair(0, 10), std::pair(1, 20)}) {
    SCOPED_TRACE(testing::Message() << "worker " << leaver);
    auto job = run({"STEP_MS=20", "VICTIM=2", text("STEP=", step), "PLACE=print"}, 3, 2, 1);
    const int process = process_of(job, leaver);
    job.wait_for_line(text("[2] step ", step), 30);
    kill(process, SIGTERM);
    expect_trained(job, 2);
    EXPECT_NE(job.text().find(text("[", leaver, "] left\n")), std::string::npos) << job.text();
    EXPECT_EQ(job.text().find("it is started again"), std::string::npos) << job.text();
  }
}

TEST_F(Elastic, WhereTooFewWouldRemainAllEnd) {
  auto job = run({"STEP_MS=20", "VICTIM=2", "STEP=10", "PLACE=print", "MIN_WORKERS=3"}, 3, 2);
  const int process = process_of(job, 1);
  job.wait_for_line("[2] step 10", 30);
  kill(process, SIGTERM);
  const auto& output = job.wait_for_end(60);
  EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  for (const int rank : {0, 1, 2}) EXPECT_NE(output.find(text("[", rank, "] left\n")), std::string::npos) << output;
}

TEST_F(Elastic, AWorkerThatDoesNotAnswerIsLeftOutAndEndsWhenItGoesOn) {
  for (const int stopped : {0, 2}) {
    SCOPED_TRACE(testing::Message() << "worker " << stopped);
    auto job = run({"STEP_MS=20", "VICTIM=1", "STEP=10", "PLACE=print", "TIMEOUT=1"}, 3, 2);
    const int process = process_of(job, stopped);
    job.wait_for_line("[1] step 10", 30);
    kill(process, SIGSTOP);
    const auto& output = job.wait_for_line(stopped == 0 ? "[1] [" : "[0] [", 30);  // the chief's warning
    kill(process, SIGCONT);
    expect_trained(job, 2);
    EXPECT_NE(output.find(text("the others took rank ", stopped, " for lost")), std::string::npos) << output;
  }
}

// The job ends, though not soon.
TEST_F(Elastic, AWorkerThatNeverAnswersAgainIsEnded) {
  auto job = run({"STEP_MS=20", "VICTIM=1", "STEP=50", "PLACE=print", "TIMEOUT=1"}, 3, 2);
  const int process = process_of(job, 2);
  job.wait_for_line("[1] step 50", 30);
  kill(process, SIGSTOP);
  const auto& output = job.wait_for_end(90);
  EXPECT_NE(output.find("rank 2 was left out by the others, which have ended"), std::string::npos) << output;
}

TEST_F(Elastic, AStragglerIsNamedWithinTwentySteps) {
  auto slow = run({"STEP_MS=20", "VICTIM=1", "PLACE=slow", "EPOCHS=1"}, 3, 2);
  EXPECT_NE(slow.wait_for_end(60).find("worker 1 is a straggler: "), std::string::npos) << slow.text();
  auto equal = run({"STEP_MS=20"}, 3, 2);
  EXPECT_EQ(equal.wait_for_end(60).find("straggler"), std::string::npos) << equal.text();
}

TEST_F(Elastic, ANewcomerThatTrainsSomethingElseIsRefused) {
  auto job = run({"VICTIM=2", "STEP=5", "PLACE=forward", "STEP_MS=50", "UNITS_OF_JOINING=9"}, 3, 2, 1);
  expect_trained(job, 2);
  EXPECT_NE(job.text().find("this process cannot join the job, which has dense.weight Double [8, 6]; it has "
                            "dense.weight Double [9, 6]"),
            std::string::npos)
      << job.text();
}

TEST_F(Elastic, OneOfThreeMayRemain) {
  auto job = run({"VICTIM=1", "STEP=10", "PLACE=forward", "STEP_MS=20"}, 3, 1);
  const int other = process_of(job, 2);
  job.wait_for_line("lockstep: rank 1 was ended by signal 9", 30);
  kill(other, SIGKILL);
  expect_trained(job, 1);
}

// Both are started again, and join when they have come.
TEST_F(Elastic, TooFewWorkersWaitForNewcomers) {
  auto job = run({"VICTIM=1", "STEP=10", "PLACE=print", "STEP_MS=20", "MIN_WORKERS=3"}, 3, 1, 2);
  const int one = process_of(job, 1), other = process_of(job, 2);
  job.wait_for_line("[1] step 10", 30);
  kill(one, SIGKILL);
  kill(other, SIGKILL);
  expect_trained(job, 3);
}

TEST_F(Elastic, WithFewerThanTheLeastItEndsAndSaysSo) {
  const auto folder = fresh_folder("elastic", "too_few");
  auto job =
      run({"VICTIM=1", "STEP=10", "PLACE=forward", "MIN_WORKERS=3", "JOIN_SECONDS=1", text("FOLDER=", folder.string())},
          3, 1);
  const auto& output = job.wait_for_end(60);
  EXPECT_TRUE(std::filesystem::exists(folder / "backup" / "backup.safetensors"));
  EXPECT_NE(output.find("workers were lost, and 2 remain; elastic.min_workers is 3"), std::string::npos) << output;
  EXPECT_FALSE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0);
}

}  // namespace
}  // namespace lockstep
