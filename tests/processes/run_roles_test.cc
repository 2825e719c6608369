// `lockstep run` with parameter servers: roles, and who is started again.
#include "base/text.h"
#include "tests/processes/run_command.h"

namespace lockstep {
namespace {

TEST(Launch, WithParameterServersRanksHaveRoles) {
  auto job = run({"--workers", "2", "--ps=1", "--evaluator"}, "echo of $LOCKSTEP_SIZE: $LOCKSTEP_ROLES");
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 0) << output;
  for (const std::string process : {"chief", "worker 0", "worker 1", "ps 0", "evaluator"}) {
    expect_has(output, text("[", process, "] of 5: worker:2,ps:1,evaluator:1"));
  }
}

TEST(Launch, AWorkerThatFailsIsStartedAgainAloneAndThenDoneWithout) {
  const auto script = "echo start $LOCKSTEP_RESTART; [ $LOCKSTEP_RANK = 1 ] && exit 3; exit 0";
  auto job = run({"--workers", "2", "--ps", "1", "--restarts", "2"}, script);
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 0) << output;
  for (const int restart : {0, 1, 2}) expect_has(output, text("[worker 0] start ", restart));
  expect_has(output, "worker 0 ended with status 3: start 0; it is started again (restart 1 of 2, role worker)");
  expect_has(output, "worker 0 ended with status 3: start 2; the job goes on without it");
  EXPECT_EQ(output.find("[chief] start 1"), std::string::npos) << output;
}

TEST(Launch, AParameterServerThatFailsEndsTheJob) {
  auto job =
      run({"--workers", "2", "--ps", "1", "--restarts", "2"}, "[ $LOCKSTEP_RANK = 3 ] && exit 5; exec sleep 1000");
  expect_has(job.wait_for_end(kSoon), "ps 0 ended with status 5");
  EXPECT_EQ(exit_status(job), 5);
}

TEST(Launch, ParameterServersNeedWorkersAndServers) {
  for (const auto& options :
       std::vector<std::vector<std::string>>{{"--workers", "2"}, {"--ps", "2"}, {"--evaluator"}}) {
    auto job = run(options, "exit 0");
    expect_has(job.wait_for_end(kSoon), "parameter servers need both --workers and --ps");
    EXPECT_EQ(exit_status(job), 1);
  }
  auto both = run({"-n", "4", "--workers", "2", "--ps", "1"}, "exit 0");
  expect_has(both.wait_for_end(kSoon), "-n and --workers are both given");
}

}  // namespace
}  // namespace lockstep
