// Who takes part, from environments as the launchers leave them, and from broken ones.
#include <gtest/gtest.h>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

using Variables = std::map<std::string, std::string>;

Cluster resolve(const Variables& variables) {
  std::vector<std::string> names;
  for (const auto& [name, value] : variables) names.push_back(name);
  return resolve_cluster(
      [&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      },
      names);
}

std::string error_of(const Variables& variables) {
  try {
    resolve(variables);
  } catch (const ClusterError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void expect_error(const Variables& variables, const std::string& part) {
  const auto error = error_of(variables);
  EXPECT_NE(error.find(part), std::string::npos) << error << "\n  expected: " << part;
}

Variables tf_config(const std::string& cluster, const std::string& task) {
  return {{"TF_CONFIG", R"({"cluster": )" + cluster + R"(, "task": )" + task + "}"}};
}

const Variables kTorchrun{
    {"RANK", "3"},       {"WORLD_SIZE", "4"},          {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "2"},
    {"GROUP_RANK", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};

TEST(Resolve, WithoutAnythingThisProcessIsAlone) {
  const auto cluster = resolve({});
  EXPECT_EQ(cluster.world.size, 1);
  EXPECT_EQ(cluster.store, "");
}

TEST(Resolve, TfConfig) {
  const std::string jobs = R"({"chief": ["h0:1"], "worker": ["h1:2", "h0:3"], "ps": ["h9:9"]})";
  const auto chief = resolve(tf_config(jobs, R"({"type": "chief", "index": 0})"));
  EXPECT_EQ(chief.world.rank, 0);
  EXPECT_EQ(chief.world.size, 3);
  EXPECT_EQ(chief.store, "h0:1");
  EXPECT_TRUE(chief.holds_store);
  const auto last = resolve(tf_config(jobs, R"({"type": "worker", "index": 1})"));
  EXPECT_EQ(last.world.rank, 2);
  EXPECT_EQ(last.world.host, "h0");
  EXPECT_EQ(last.world.local_rank, 1);
  EXPECT_EQ(last.world.local_size, 2);
  EXPECT_FALSE(last.holds_store);
  EXPECT_EQ(resolve(tf_config(jobs, R"({"type": "ps", "index": 0})")).task_type, "ps");
  const auto old =
      resolve(tf_config(R"({"master": ["h:1"], "worker": ["[::1]:2"]})", R"({"type": "master", "index": 0})"));
  EXPECT_EQ(old.task_type, "chief");
  EXPECT_EQ(old.world.size, 2);
}

TEST(Resolve, TfConfigThatIsWrongIsNamed) {
  const std::string two = R"({"worker": ["a:1", "b:2"]})", first = R"({"type": "worker", "index": 0})";
  expect_error({{"TF_CONFIG", "{cluster"}}, "TF_CONFIG: it is not a JSON object");
  expect_error({{"TF_CONFIG", "[]"}}, "TF_CONFIG: it is not a JSON object");
  expect_error({{"TF_CONFIG", R"({"cluster": {"worker": ["a:1"]}})"}}, "TF_CONFIG: task is missing");
  expect_error({{"TF_CONFIG", R"({"task": {"type": "worker", "index": 0}})"}}, "TF_CONFIG: cluster is missing");
  expect_error(tf_config(two, R"({"type": "worker", "index": 2})"), "task.index is 2; cluster.worker has 2 entries");
  expect_error(tf_config(two, R"({"type": "worker", "index": -1})"), "task.index is -1");
  expect_error(tf_config(two, R"({"type": "worker", "index": "0"})"), "task.index is \"0\"");
  expect_error(tf_config(two, R"({"type": "worker"})"), "task.index is missing");
  expect_error(tf_config(two, R"({"type": "chief", "index": 0})"), "task.type is \"chief\", which is not in cluster");
  expect_error(tf_config(two, "7"), "task.type is missing");
  expect_error(tf_config(R"({"worker": ["a"]})", first), "cluster.worker[0] is \"a\"; it must be host:port");
  expect_error(tf_config(R"({"worker": ["a:99999"]})", first), "cluster.worker[0] is \"a:99999\"");
  expect_error(tf_config(R"({"worker": [7]})", first), "cluster.worker[0] is not a string");
  expect_error(tf_config(R"({"worker": "a:1"})", first), "cluster.worker is not a list");
  expect_error(tf_config(R"({"worker": ["a:1", "a:1"]})", first), "cluster has a:1 twice");
  expect_error(tf_config(R"({"boss": ["a:1"]})", first), "cluster has \"boss\"");
  expect_error(tf_config(R"({"chief": ["a:1", "b:1"]})", R"({"type": "chief", "index": 0})"), "there is one chief");
  expect_error({{"TF_CONFIG", std::string(2 << 20, ' ')}}, "at most 1048576");
  expect_error({{"TF_CONFIG", std::string(100, '[')}}, "nested deeper than 8");
}

TEST(Resolve, Torchrun) {
  const auto cluster = resolve(kTorchrun);
  EXPECT_EQ(cluster.world.rank, 3);
  EXPECT_EQ(cluster.world.local_rank, 1);
  EXPECT_EQ(cluster.world.host, "node 1");
  EXPECT_EQ(cluster.store, "127.0.0.1:29500");
  auto elastic = kTorchrun;
  elastic["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(resolve(elastic).store, "127.0.0.1");
  EXPECT_EQ(resolve(elastic).job, "torchrun none at 127.0.0.1:29500, restart 0");
  for (const auto& [name, value] :
       Variables{{"RANK", "4"}, {"RANK", "x"}, {"WORLD_SIZE", "0"}, {"MASTER_PORT", "70000"}}) {
    auto wrong = kTorchrun;
    wrong[name] = value;
    expect_error(wrong, name + " is \"" + value + "\"; it must be a number from ");
  }
  auto unknown = kTorchrun;
  unknown.erase("LOCAL_WORLD_SIZE");
  expect_error(unknown, "LOCAL_WORLD_SIZE is not set");
  auto less = kTorchrun;
  less.erase("MASTER_ADDR");
  expect_error(less, "MASTER_ADDR is not set");
}

// A process that was to be one of several must not train alone.
TEST(Resolve, SomeOfTorchrunsVariablesAreNotEnough) {
  expect_error({{"WORLD_SIZE", "2"}}, "WORLD_SIZE is \"2\", and RANK is not set");
  expect_error({{"MASTER_ADDR", "host"}, {"MASTER_PORT", "1234"}}, "MASTER_ADDR is \"host\", and RANK is not set");
  expect_error({{"RANK", "0"}, {"MASTER_ADDR", "host"}}, "WORLD_SIZE is not set");
  expect_error({{"RANK", "0"}}, "RANK is \"0\", and WORLD_SIZE is not set: set RANK, WORLD_SIZE, MASTER_ADDR and");
  expect_error({{"LOCAL_RANK", "1"}}, "LOCAL_RANK is \"1\", and RANK is not set");
  expect_error({{"LOCKSTEP_STORE", "a:1"}},
               "LOCKSTEP_STORE is \"a:1\", and LOCKSTEP_RANK is not set: start the program by");
  EXPECT_EQ(resolve({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).world.size, 1);
  auto mpi = Variables{{"OMPI_COMM_WORLD_SIZE", "1"},
                       {"OMPI_COMM_WORLD_RANK", "0"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                       {"MASTER_ADDR", "host"}};
  EXPECT_EQ(resolve(mpi).source, "Open MPI");
}

TEST(Resolve, PortsThatAreNoneAreRefused) {
  const std::string first = R"({"type": "worker", "index": 0})";
  for (const auto* port : {"0", "65536", "99999", "-1", "1x", ""}) {
    expect_error(tf_config(text(R"({"worker": ["a:)", port, R"(", "b:2"]})"), first), "with a port from 1 to 65535");
  }
}

// No resolver understands these launchers.
TEST(Resolve, AProcessOfAnotherLauncherDoesNotTrainAlone) {
  for (const std::string rank :
       {"PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK",
        "AWS_BATCH_JOB_NODE_INDEX", "HOROVOD_RANK", "LWS_WORKER_INDEX"}) {
    expect_error({{rank, "0"}}, rank + " is \"0\", so this is one of the processes of a launcher");
  }
  expect_error({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
  EXPECT_EQ(resolve({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).world.size, 1);
  EXPECT_EQ(resolve({{"PMI_RANK", ""}}).world.size, 1);
}

const Variables kNode{
    {"PET_NNODES", "3"},          {"PET_NODE_RANK", "2"},         {"PET_MASTER_ADDR", "job-node-0-0.job"},
    {"PET_MASTER_PORT", "29400"}, {"PET_NPROC_PER_NODE", "auto"}, {"JOB_COMPLETION_INDEX", "2"}};

TEST(Resolve, Kubeflow) {
  const auto cluster = resolve(kNode);
  EXPECT_EQ(cluster.world.rank, 2);
  EXPECT_EQ(cluster.world.size, 3);
  EXPECT_EQ(cluster.store, "job-node-0-0.job:29400");
  EXPECT_EQ(cluster.warning, "");
  auto node = kNode;
  for (const std::string one : {"gpu", "cpu", "1"}) {
    node["PET_NPROC_PER_NODE"] = one;
    EXPECT_EQ(resolve(node).warning, "") << one;
  }
  node["PET_NPROC_PER_NODE"] = "4";
  EXPECT_EQ(resolve(node).world.size, 3);
  EXPECT_NE(resolve(node).warning.find("PET_NPROC_PER_NODE is 4, and this process is the only one of its node"),
            std::string::npos);
  for (const std::string wrong : {"0", "tpu", "1.5"}) {
    node["PET_NPROC_PER_NODE"] = wrong;
    expect_error(node, "PET_NPROC_PER_NODE is \"" + wrong + "\"; it must be auto, gpu, cpu, or a number from 1 to");
  }
}

TEST(Resolve, KubeflowsElasticPolicy) {
  Variables pod{{"PET_NNODES", "1:4"}, {"PET_RDZV_ENDPOINT", "job-worker-0:23456"}, {"PET_RDZV_BACKEND", "c10d"}};
  expect_error(pod, "PET_NNODES is \"1:4\": the number of nodes is not fixed");
  expect_error(pod, "lockstep run --nnodes 1:4 --store job-worker-0:23456");
  pod["PET_NNODES"] = "3";
  expect_error(pod, "PET_NNODES is \"3\", and PET_NODE_RANK is not set");
  pod.erase("PET_NNODES");
  expect_error(pod, "PET_RDZV_ENDPOINT is \"job-worker-0:23456\", and PET_NNODES is not set");
  auto node = kNode;
  node["PET_NNODES"] = "3:3";
  EXPECT_EQ(resolve(node).world.size, 3);
  for (const std::string wrong : {"4:1", "0:2", "1:", ":4", "x", "1:2:3"}) {
    node["PET_NNODES"] = wrong;
    expect_error(node, "PET_NNODES is \"" + wrong + "\"; it must be a number from 1 to");
  }
}

// PyTorchJob counts the processes that torchrun would start in WORLD_SIZE, and RANK is the pod's.
TEST(Resolve, ThePodOfAPyTorchJobIsANode) {
  Variables pod{{"RANK", "1"},          {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "job-master-0"}, {"MASTER_PORT", "23456"},
                {"PET_NODE_RANK", "1"}, {"PET_NNODES", "2"}, {"PET_NPROC_PER_NODE", "4"}};
  const auto cluster = resolve(pod);
  EXPECT_EQ(cluster.world.rank, 1);
  EXPECT_EQ(cluster.world.size, 2);
  EXPECT_EQ(cluster.store, "job-master-0:23456");
  EXPECT_NE(cluster.warning, "");
  pod["LOCAL_RANK"] = "1";  // of torchrun, in the pod
  pod["LOCAL_WORLD_SIZE"] = "4";
  pod["RANK"] = "5";
  EXPECT_EQ(resolve(pod).world.rank, 5);
  EXPECT_EQ(resolve(pod).world.size, 8);
}

TEST(Resolve, IndexedJob) {
  Variables pod{{"JOB_COMPLETION_INDEX", "1"}};
  const std::string is_one = "JOB_COMPLETION_INDEX is \"1\" (a pod of an Indexed Job), and ";
  expect_error(pod, is_one + "WORLD_SIZE is not set. Set WORLD_SIZE to the number of completions");
  pod["WORLD_SIZE"] = "1";
  EXPECT_EQ(resolve(pod).world.size, 1);
  pod["WORLD_SIZE"] = "2";
  expect_error(pod, is_one + "MASTER_ADDR is not set");
  pod["MASTER_ADDR"] = "train-0.train";
  expect_error(pod, is_one + "MASTER_PORT is not set");
  pod["MASTER_PORT"] = "29500";
  const auto cluster = resolve(pod);
  EXPECT_EQ(cluster.world.rank, 1);
  EXPECT_EQ(cluster.world.size, 2);
  EXPECT_EQ(cluster.store, "train-0.train:29500");
  EXPECT_FALSE(cluster.holds_store);
  pod["JOBSET_NAME"] = "train";  // whose second Job has an index 0 too
  expect_error(pod, is_one + "JOBSET_NAME is \"train\": in a JobSet that index counts within one of its Jobs");
  pod["RANK"] = "1";
  EXPECT_EQ(resolve(pod).source, "torchrun");
  pod.erase("JOBSET_NAME");
  pod.erase("RANK");
  pod["JOB_COMPLETION_INDEX"] = "2";
  expect_error(pod, "JOB_COMPLETION_INDEX is \"2\"; it must be a number from 0 to 1");
  expect_error({{"JOBSET_NAME", "train"}}, "JOBSET_NAME is \"train\", and JOB_COMPLETION_INDEX is not set");
}

TEST(Resolve, Volcano) {
  Variables pod{
      {"VC_TASK_INDEX", "1"}, {"VC_WORKER_HOSTS", "job-worker-0.job,job-worker-1.job"}, {"VC_WORKER_NUM", "2"}};
  const auto cluster = resolve(pod);
  EXPECT_EQ(cluster.world.rank, 1);
  EXPECT_EQ(cluster.world.size, 2);
  EXPECT_EQ(cluster.world.host, "job-worker-1.job");
  EXPECT_EQ(cluster.store, "job-worker-0.job");
  EXPECT_FALSE(cluster.holds_store);
  pod["VC_TASK_INDEX"] = "2";
  expect_error(pod, "VC_TASK_INDEX is \"2\"; it must be a number from 0 to 1");
  pod["VC_MASTER_HOSTS"] = "job-master-0.job";
  expect_error(pod, "Volcano: there are VC_MASTER_HOSTS and VC_WORKER_HOSTS");
  expect_error({{"VK_TASK_INDEX", "0"}}, "Volcano: VK_TASK_INDEX is \"0\", and no VC_<TASK>_HOSTS is set");
  expect_error({{"VC_WORKER_HOSTS", "a,b"}}, "Volcano: VC_WORKER_HOSTS is set, and VC_TASK_INDEX is not");
  auto with_plugin_pytorch = kTorchrun;
  with_plugin_pytorch.insert(pod.begin(), pod.end());
  EXPECT_EQ(resolve(with_plugin_pytorch).source, "torchrun");
}

TEST(Resolve, Slurm) {
  Variables task{{"SLURM_PROCID", "3"},  {"SLURM_STEP_NUM_TASKS", "5"}, {"SLURM_STEP_NODELIST", "n[08-10]"},
                 {"SLURM_NODEID", "1"},  {"SLURM_LOCALID", "1"},        {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                 {"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "0"}};
  const auto cluster = resolve(task);
  EXPECT_EQ(cluster.world.rank, 3);
  EXPECT_EQ(cluster.world.host, "n09");
  EXPECT_EQ(cluster.world.local_size, 2);
  EXPECT_EQ(cluster.store, "n08");
  EXPECT_EQ(cluster.job, "Slurm 17.0");
  task["SLURM_STEP_TASKS_PER_NODE"] = "5";
  expect_error(task, "SLURM_STEP_TASKS_PER_NODE is of 1 nodes, SLURM_STEP_NODELIST of 3");
  task.erase("SLURM_STEP_NODELIST");
  expect_error(task, "SLURM_PROCID is \"3\", and SLURM_STEP_NODELIST is not set: start the program by srun");
  task["SLURM_PROCID"] = "0";  // a batch script
  EXPECT_EQ(resolve(task).world.size, 1);
  EXPECT_EQ(resolve(task).warning, "");
  task["SLURM_NTASKS"] = "5";
  EXPECT_NE(resolve(task).warning.find("SLURM_NTASKS is 5, and this process was not started by srun"),
            std::string::npos);
}

TEST(Resolve, TpuHosts) {
  Variables host{{"TPU_WORKER_HOSTNAMES", "tpu-0.tpu,tpu-1.tpu"}, {"TPU_WORKER_ID", "1"}};
  const auto cluster = resolve(host);
  EXPECT_EQ(cluster.world.rank, 1);
  EXPECT_EQ(cluster.world.size, 2);
  EXPECT_EQ(cluster.world.host, "tpu-1.tpu");
  EXPECT_EQ(cluster.store, "tpu-0.tpu");
  EXPECT_FALSE(cluster.holds_store);
  host["TPU_WORKER_ID"] = "2";
  expect_error(host, "TPU_WORKER_ID is \"2\"; it must be a number from 0 to 1");
  host["LOCKSTEP_RANK"] = "0";  // of `lockstep run`, which numbers the hosts itself
  host["LOCKSTEP_SIZE"] = "2";
  host["LOCKSTEP_LOCAL_RANK"] = "0";
  host["LOCKSTEP_LOCAL_SIZE"] = "1";
  host["LOCKSTEP_HOST"] = "a";
  host["LOCKSTEP_STORE"] = "a:1";
  EXPECT_EQ(resolve(host).source, "lockstep run");
  EXPECT_EQ(resolve({{"TPU_WORKER_HOSTNAMES", "localhost"}, {"TPU_WORKER_ID", "0"}}).world.size, 1);
  EXPECT_EQ(resolve({{"TPU_WORKER_HOSTNAMES", ""}}).world.size, 1);
  EXPECT_EQ(resolve({{"TPU_WORKER_ID", "0"}}).world.size, 1);
  expect_error({{"TPU_WORKER_ID", "1"}}, "TPU_WORKER_ID is \"1\", and TPU_WORKER_HOSTNAMES is \"\"");
  EXPECT_EQ(resolve({{"MEGASCALE_NUM_SLICES", "1"}}).world.size, 1);
  expect_error({{"MEGASCALE_NUM_SLICES", "2"}}, "MEGASCALE_NUM_SLICES is \"2\": a job trains on one slice");
  expect_error({{"TPU_WORKER_HOSTNAMES", "a,b"}}, "TPU_WORKER_HOSTNAMES names 2 hosts, and TPU_WORKER_ID");
  expect_error({{"TPU_WORKER_HOSTNAMES", "a,,b"}}, "TPU_WORKER_HOSTNAMES is \"a,,b\": a host's name is empty");
}

TEST(Resolve, Mpi) {
  Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                     {"PMIX_NAMESPACE", "1031929857"},    {"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NODELIST", "n1"}};  // of the daemon that Slurm started
  EXPECT_EQ(resolve(open_mpi).store, "127.0.0.1");
  EXPECT_EQ(resolve(open_mpi).source, "Open MPI");
  open_mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  open_mpi["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  open_mpi["PMIX_HOSTNAME"] = "n2";
  expect_error(open_mpi, "mpirun -x MASTER_ADDR=host");
  open_mpi["MASTER_ADDR"] = "n1";
  EXPECT_EQ(resolve(open_mpi).store, "n1");

  const auto mpich = resolve(
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"PMI_FD", "6"}, {"MPI_LOCALNRANKS", "2"}, {"MPI_LOCALRANKID", "0"}});
  EXPECT_EQ(mpich.source, "MPICH");
  EXPECT_EQ(pmi_descriptor([](const char*) { return "6"; }), 6);
  EXPECT_TRUE(mpich.holds_store);
}

TEST(Resolve, TwoSourcesThatDisagreeAreBothNamed) {
  auto both = kTorchrun;
  both["TF_CONFIG"] = R"({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}})";
  expect_error(both, "TF_CONFIG says rank 1 of 2, and torchrun says rank 3 of 4");
}

TEST(NodeList, IsWhatScontrolMakesOfIt) {
  using List = std::vector<std::string>;
  const auto expand = [](const std::string& list) { return expand_node_list(list, "LIST"); };
  EXPECT_EQ(expand("a"), (List{"a"}));
  EXPECT_EQ(expand("a,b7"), (List{"a", "b7"}));
  EXPECT_EQ(expand("n[1-3,07],other"), (List{"n1", "n2", "n3", "n07", "other"}));
  EXPECT_EQ(expand("n[008-011]"), (List{"n008", "n009", "n010", "n011"}));
  EXPECT_EQ(expand("r[1-2]n[3-4]x"), (List{"r1n3x", "r1n4x", "r2n3x", "r2n4x"}));
  for (const std::string wrong : {"", "a,", ",a", "a[", "a[1", "a[1-", "a[2-1]", "a[x]", "a]", "a[]", "a[1-9999999999]",
                                  "a[0-999999]b[0-9]", "a[1-999]b[1-999]", "a[1]]"}) {
    EXPECT_THROW(expand(wrong), ClusterError) << wrong;
  }
  EXPECT_THROW(expand(std::string(256, 'n')), ClusterError);
  EXPECT_EQ(expand_task_counts("2(x3),1", "COUNTS"), (std::vector<int>{2, 2, 2, 1}));
  for (const std::string wrong : {"", "x", "2(", "2(x", "2(x3", "2(3)", "1,,2", "2(x999999999)"}) {
    EXPECT_THROW(expand_task_counts(wrong, "COUNTS"), ClusterError) << wrong;
  }
}

}  // namespace
}  // namespace lockstep::cluster
