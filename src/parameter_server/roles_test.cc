#include "parameter_server/roles.h"

#include <gtest/gtest.h>

#include "base/expect_says_testing.h"

namespace lockstep::parameter_server {
namespace {

Cluster resolve(std::map<std::string, std::string> variables) {
  return resolve_cluster([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Cluster of_lockstep_run(int rank, int size, const std::string& roles) {
  return resolve({{"LOCKSTEP_RANK", std::to_string(rank)},
                  {"LOCKSTEP_SIZE", std::to_string(size)},
                  {"LOCKSTEP_LOCAL_RANK", "0"},
                  {"LOCKSTEP_LOCAL_SIZE", "1"},
                  {"LOCKSTEP_HOST", "h"},
                  {"LOCKSTEP_STORE", "127.0.0.1:1"},
                  {"LOCKSTEP_ROLES", roles}});
}

Cluster of_tf_config(const std::string& task) {
  return resolve(
      {{"TF_CONFIG",
        R"({"cluster": {"chief": ["h0:1"], "worker": ["h1:2", "h2:3"], "ps": ["h1:9"]}, "task": )" + task + "}"}});
}

std::string text_of(const Cluster& cluster) {
  const auto roles = roles_of(cluster);
  return std::string(name_of(roles.mine)) + " " + std::to_string(roles.index) + " of " + std::to_string(roles.workers) +
         " workers, " + std::to_string(roles.servers) + " servers" + (roles.evaluator ? ", an evaluator" : "");
}

TEST(Roles, OfLockstepRun) {
  const auto role = [](int rank) {
    return text_of(with_roles(of_lockstep_run(rank, 5, "worker:2,ps:1,evaluator:1"), {}, false));
  };
  EXPECT_EQ(role(0), "chief 0 of 2 workers, 1 servers, an evaluator");
  EXPECT_EQ(role(1), "worker 0 of 2 workers, 1 servers, an evaluator");
  EXPECT_EQ(role(2), "worker 1 of 2 workers, 1 servers, an evaluator");
  EXPECT_EQ(role(3), "ps 0 of 2 workers, 1 servers, an evaluator");
  EXPECT_EQ(role(4), "evaluator 0 of 2 workers, 1 servers, an evaluator");
}

TEST(Roles, OfTfConfigWithTheStoreAtTheChief) {
  const auto chief = with_roles(of_tf_config(R"({"type": "chief", "index": 0})"), {}, false);
  EXPECT_EQ(text_of(chief), "chief 0 of 2 workers, 1 servers");
  EXPECT_TRUE(chief.holds_store);
  const auto server = with_roles(of_tf_config(R"({"type": "ps", "index": 0})"), {}, false);
  EXPECT_EQ(text_of(server), "ps 0 of 2 workers, 1 servers");
  EXPECT_EQ(server.store, "h0:1");
  EXPECT_FALSE(server.holds_store);
  EXPECT_EQ(server.world.rank, 3);
  EXPECT_EQ(server.world.size, 4);
  EXPECT_EQ(server.world.host, "h1");
  EXPECT_EQ(server.world.local_rank, 1);  // after worker 0
  EXPECT_EQ(server.world.local_size, 2);
}

TEST(Roles, ByNumberWhereTheLauncherKnowsNone) {
  const auto role = [](int rank, bool evaluator) {
    return text_of(with_roles({.world = {.rank = rank, .size = 6}, .source = "MPICH"}, 2, evaluator));
  };
  EXPECT_EQ(role(0, false), "chief 0 of 3 workers, 2 servers");
  EXPECT_EQ(role(3, false), "worker 2 of 3 workers, 2 servers");
  EXPECT_EQ(role(4, false), "ps 0 of 3 workers, 2 servers");
  EXPECT_EQ(role(4, true), "ps 1 of 2 workers, 2 servers, an evaluator");
  EXPECT_EQ(role(5, true), "evaluator 0 of 2 workers, 2 servers, an evaluator");
}

TEST(Roles, WhatIsMissingIsNamed) {
  expect_says(message_of<ClusterError>([] { with_roles({}, {}, false); }), "there is no worker in the cluster");
  expect_says(message_of<ClusterError>([] { with_roles({.world = {.size = 4}, .source = "MPICH"}, {}, false); }),
              "there is no ps in the cluster (MPICH)");
  expect_says(message_of<InvalidArgument>([] { with_roles(of_lockstep_run(0, 4, "worker:2,ps:1"), 2, false); }),
              "num_ps is 2, and lockstep run has 1");
  expect_says(message_of<ClusterError>([] { of_lockstep_run(0, 4, "worker:2,ps:2"); }),
              "with the chief these are 5 processes, and LOCKSTEP_SIZE is 4");
  expect_says(message_of<ClusterError>([] { of_lockstep_run(0, 4, "worker:2,server:1"); }),
              "there are worker, ps and evaluator");
  expect_says(message_of<ClusterError>([] { of_lockstep_run(0, 4, "worker:0,ps:3"); }), "worker:0");
  expect_says(message_of<ClusterError>([] { of_lockstep_run(0, 4, "ps:2,ps:1"); }), "ps comes twice");
}

}  // namespace
}  // namespace lockstep::parameter_server
