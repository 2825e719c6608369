// Trainings of three workers, through `lockstep run`, that go on when some of them are lost.
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <fstream>
#include <random>
#include <string>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/elastic_job.h"

namespace lockstep {
namespace {

Process run(const std::vector<std::string>& variables, int workers, int fewest, int restarts = 0) {
  return elastic_job(ELASTIC_PROGRAM, variables, workers, fewest, restarts);
}

constexpr int kEpochs = 3, kSteps = 20 * kEpochs;

class Elastic : public testing::Test {
 protected:
  // Returns the output of one process that trains without others.
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
    // The losses and metrics of each epoch are right too: nothing that the lost worker had computed is lost.
    const auto histories = numbers_after(job.text(), "history"), expected = numbers_after(alone(), "history");
    for (const auto& history : histories) EXPECT_LE(difference(history, expected.at(0)), 1e-9) << job.text();
  }
}

TEST_F(Elastic, AWorkerThatThrowsIsLostForTheOthers) {
  auto job = run({"VICTIM=1", "STEP=25", "PLACE=throw"}, 3, 2);
  expect_trained(job, 2);
  EXPECT_NE(job.text().find("[1] failed: this machine is broken"), std::string::npos) << job.text();
}

// The step would fail on one worker after the other.
TEST_F(Elastic, WhereAStepThrowsOnTwoWorkersAllEnd) {
  auto job = run({"RECORD=100"}, 4, 1);
  const auto& output = job.wait_for_end(60);
  EXPECT_FALSE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  EXPECT_NE(output.find("the program failed on 2 workers in the same step, so that the others end too: worker "),
            std::string::npos)
      << output;
  EXPECT_EQ(numbers_after(output, "] failed: a bad record").size(), 2U) << output;
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

// Losses come in all phases of a step, of the agreement after the step, and of the next step.
TEST_F(Elastic, AWorkerMayBeLostAtAnyMoment) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 4 : std::atoi(asked);
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
  // The second worker leaves in the evaluation after an epoch.
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
    const auto& output = job.wait_for("fit goes on with 2 workers (3 before)", 30);
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

TEST_F(Elastic, AWorkerThatHangsLogsTheStacksOfItsThreads) {
  auto job = run({"STEP_MS=20", "VICTIM=1", "STEP=10", "PLACE=hang", "TIMEOUT=2", "EPOCHS=1", "VALIDATE=0"}, 3, 2);
  const auto& output = job.wait_for_end(60);
  const auto begin = output.find("fit: no batch of this worker has ended for ");
  ASSERT_NE(begin, std::string::npos) << output;
  EXPECT_NE(output.find("[1]   pause (libc.so.6+0x"), std::string::npos) << output;
  EXPECT_NE(output.find("all_reduce", begin), std::string::npos) << output;  // in which the others wait
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

// Forwards 120 to 139 of a worker are those of the evaluation between two fits, and the next ones of the second fit.
TEST_F(Elastic, AWorkerIsLostBetweenTwoFitsOrInTheSecond) {
  auto whole = run({"FITS=2"}, 0, 0);
  const auto output = whole.wait_for_end(60);
  const auto weights = numbers_after(output, "steps 120, weights"), between = numbers_after(output, "between fits");
  ASSERT_EQ(weights.size(), 1U) << output;
  for (const auto& [step, place] : {std::pair(130, "forward"), std::pair(-1, "predict"), std::pair(150, "forward")}) {
    SCOPED_TRACE(testing::Message() << place << " " << step);
    auto job = run({"FITS=2", "VICTIM=1", text("STEP=", step), text("PLACE=", place)}, 3, 2);
    const auto got = numbers_after(job.wait_for_end(60), "steps 120, weights");
    EXPECT_EQ(got.size(), 2U) << job.text();
    for (const auto& one : got) EXPECT_LE(difference(one, weights[0]), 1e-9) << job.text();
    for (const auto& one : numbers_after(job.text(), "between fits"))
      EXPECT_LE(difference(one, between.at(0)), 1e-9) << job.text();
  }
}

// A newcomer trains it too, which made its second model before it joined.
TEST_F(Elastic, AnotherModelIsTrainedAfterALossInTheFirst) {
  auto whole = run({"MODELS=2"}, 0, 0);
  const auto expected = numbers_after(whole.wait_for_end(60), "second");
  ASSERT_EQ(expected.size(), 1U) << whole.text();
  for (const int restarts : {0, 1}) {
    SCOPED_TRACE(testing::Message() << restarts << " restarts");
    auto job =
        run({"MODELS=2", "VICTIM=1", "STEP=15", "PLACE=forward", text("STEP_MS=", 30 * restarts)}, 3, 2, restarts);
    const auto got = numbers_after(job.wait_for_end(60), "second");
    EXPECT_EQ(static_cast<int>(got.size()), 2 + restarts) << job.text();
    for (const auto& one : got) EXPECT_LE(difference(one, expected[0]), 1e-9) << job.text();
  }
}

TEST_F(Elastic, ANewcomerComesToTheSecondFit) {
  auto job = run({"FITS=2", "VICTIM=1", "STEP=138", "PLACE=forward", "STEP_MS=30"}, 3, 2, 1);
  EXPECT_EQ(numbers_after(job.wait_for_end(60), "steps 120, weights").size(), 3U) << job.text();
  EXPECT_NE(job.text().find("fit number 1 of this program has ended before this process came"), std::string::npos)
      << job.text();
  EXPECT_NE(job.text().find("joined at step"), std::string::npos) << job.text();
  const auto got = numbers_after(job.text(), "steps 120, weights");
  for (const auto& one : got) EXPECT_EQ(one, got[0]) << job.text();
}

TEST_F(Elastic, OneOfThreeMayRemain) {
  auto job = run({"VICTIM=1", "STEP=10", "PLACE=forward", "STEP_MS=20"}, 3, 1);
  const int other = process_of(job, 2);
  job.wait_for_line("lockstep: rank 1 was ended by signal 9", 30);
  kill(other, SIGKILL);
  expect_trained(job, 1);
}

// Nobody could take in the processes in the places of the first: the job starts again, as if none had been started.
TEST_F(Elastic, WhereAllAreLostTheWholeJobStartsAgainFromItsBackup) {
  struct Case {
    const char* name;
    int workers, restarts;
    bool at_once;
  };
  for (const auto& [name, workers, restarts, at_once] :
       {Case{"one after the other", 3, 2, false}, Case{"at once", 3, 1, true}, Case{"alone", 1, 1, true}}) {
    SCOPED_TRACE(name);
    const auto folder = fresh_folder("elastic", text("all_lost_", workers, restarts));
    auto job = run({text("VICTIM=", workers - 1), "STEP=25", "PLACE=print", "STEP_MS=20", "VALIDATE=0",
                    text("FOLDER=", folder.string())},
                   workers, 1, restarts);
    std::vector<int> processes;
    for (int rank = 0; rank < workers; ++rank) processes.push_back(process_of(job, rank));
    job.wait_for_line(text("[", workers - 1, "] step 25"), 30);
    for (int rank = 0; rank < workers; ++rank) {
      kill(processes[static_cast<std::size_t>(rank)], SIGKILL);
      if (!at_once && rank < 2) job.wait_for(text("lockstep: rank ", rank, " was ended by signal 9"), 30);
    }
    expect_trained(job, workers);
    EXPECT_NE(job.text().find("lockstep run: no worker is left that could take in others\nlockstep run: the whole job "
                              "starts again, from its last backup if it has one: restart 1 of "),
              std::string::npos)
        << job.text();
    EXPECT_EQ(job.text().find("restart 2 of 1"), std::string::npos) << job.text();
    const auto begins = numbers_after(job.text(), "starts again at step ");
    EXPECT_EQ(begins.size(), static_cast<std::size_t>(workers)) << job.text();
    for (const auto& begin : begins) EXPECT_TRUE(begin.at(0) > 24 && begin.at(0) < 60) << job.text();
  }
}

TEST_F(Elastic, WhereAllAreLostWithoutARestartTheJobEndsAndSaysSo) {
  auto job = run({"VICTIM=0", "STEP=10", "PLACE=print", "STEP_MS=20"}, 2, 1);
  const int one = process_of(job, 0), other = process_of(job, 1);
  job.wait_for_line("[0] step 10", 30);
  kill(one, SIGKILL);
  kill(other, SIGKILL);
  const auto& output = job.wait_for_end(60);
  EXPECT_EQ(WEXITSTATUS(job.status()), 128 + SIGKILL) << output;
  EXPECT_NE(output.find("no worker is left that could take in others"), std::string::npos) << output;
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

// The others come together, and so does the process that is started in its place. Backups are made at meetings.
TEST_F(Elastic, WorkersApartMayBeLostAtAnyMoment) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 4 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const int victim = static_cast<int>(random() % 3), step = static_cast<int>(random() % 40),
              microseconds = static_cast<int>(random() % 2000), restarts = seed % 2;
    const auto folder = fresh_folder("elastic", "apart");
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": worker " << victim << ", " << microseconds
                                    << " us after the forward pass of step " << step);
    auto job =
        run({"DILOCO=2", text("VICTIM=", victim), text("STEP=", step), text("PLACE=", microseconds),
             text("BACKGROUND=", seed / 2 % 2), text("STEP_MS=", 10 * restarts), text("FOLDER=", folder.string())},
            3, 2, restarts);
    const auto& output = job.wait_for_end(60);
    EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
    const auto got = numbers_after(output, ", weights");
    EXPECT_GE(got.size(), 2U) << output;
    for (const auto& weights : got) EXPECT_EQ(weights, got[0]) << output;
  }
}

}  // namespace
}  // namespace lockstep
