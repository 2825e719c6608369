// Pods: of Kubeflow Trainer and PyTorchJob, of a Volcano Job, of an Indexed Job, and on the hosts of a TPU.
#include <iterator>
#include <map>
#include <sstream>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

constexpr const char* kByHand = "RANK (from 0), WORLD_SIZE, MASTER_ADDR and MASTER_PORT";

bool is_set(const Environment& environment, const char* name) { return value_of(environment, name) != nullptr; }

// "4" or "4:4": the least and the most nodes.
int number_of_nodes(const Environment& environment) {
  const auto value = text_of(environment, "PET_NNODES");
  const auto colon = value.find(':');
  if (colon == std::string::npos) return number_of(environment, "PET_NNODES", 1, kMostRanks);
  const auto least = whole_number<int>(value.substr(0, colon)), most = whole_number<int>(value.substr(colon + 1));
  if (!least || !most || *least < 1 || *most < *least || *most > kMostRanks) {
    throw ClusterError(text("PET_NNODES is \"", value, "\"; it must be a number from 1 to ", kMostRanks,
                            ", or two with a colon between them, the least and the most nodes"));
  }
  if (*least == *most) return *most;
  const char* const endpoint = environment("PET_RDZV_ENDPOINT");
  throw ClusterError(text(
      "PET_NNODES is \"", value, "\": the number of nodes is not fixed, so this process cannot know ",
      "its rank. Start the program on each node by torchrun --no-python, or by lockstep run --nnodes ", value,
      " --store ", endpoint != nullptr ? endpoint : "HOST:PORT", ", or give as many nodes as the least and the most"));
}

// A warning where PET_NPROC_PER_NODE asks for more than this process, which is alone on its node. Empty: none.
std::string warning_of_node(const Environment& environment) {
  if (!is_set(environment, "PET_NPROC_PER_NODE")) return "";
  const auto value = text_of(environment, "PET_NPROC_PER_NODE");
  for (const char* const replica_for_each : {"auto", "gpu", "cpu"}) {
    if (value == replica_for_each) return "";
  }
  const auto number = whole_number(value);
  if (!number || *number < 1 || *number > kMostRanks) {
    throw ClusterError(
        text("PET_NPROC_PER_NODE is \"", value, "\"; it must be auto, gpu, cpu, or a number from 1 to ", kMostRanks));
  }
  if (*number == 1) return "";
  return text("PET_NPROC_PER_NODE is ", value, ", and this process is the only one of its node: a strategy gives it a ",
              "replica for each GPU or core. For ", value, " processes start the program by torchrun --no-python");
}

// [variable], such as VC_WORKER_HOSTS: the hosts of a task.
std::map<std::string, std::vector<std::string>> tasks_of_volcano(const Environment& environment,
                                                                 const std::vector<std::string>& names) {
  std::map<std::string, std::vector<std::string>> tasks;
  for (const auto& name : names) {
    if (!name.starts_with("VC_") || !name.ends_with("_HOSTS")) continue;
    std::istringstream list(text_of(environment, name.c_str()));
    for (std::string host; std::getline(list, host, ',');) tasks[name].push_back(host);
  }
  return tasks;
}

}  // namespace

bool is_kubeflow_node(const Environment& environment) {
  return is_set(environment, "PET_NNODES") && is_set(environment, "PET_NODE_RANK") &&
         !is_set(environment, "LOCAL_RANK") && !is_set(environment, "TORCHELASTIC_RUN_ID");
}

std::optional<Cluster> from_kubeflow(const Environment& environment) {
  if (!is_set(environment, "PET_NNODES")) return std::nullopt;
  if (environment("RANK") != nullptr && !is_kubeflow_node(environment)) return std::nullopt;
  Cluster cluster{.source = "Kubeflow Trainer"};
  auto& world = cluster.world;
  world.size = number_of_nodes(environment);
  cluster.warning = warning_of_node(environment);
  if (world.size == 1) return cluster;
  if (!is_set(environment, "PET_NODE_RANK")) {
    throw ClusterError(text("PET_NNODES is \"", world.size, "\", and PET_NODE_RANK is not set: set PET_NODE_RANK, ",
                            "PET_MASTER_ADDR and PET_MASTER_PORT, or start the program on each node by torchrun ",
                            "--no-python, which numbers the nodes itself"));
  }
  world.rank = number_of(environment, "PET_NODE_RANK", 0, world.size - 1);
  world.host = text("node ", world.rank);
  const bool is_of_trainer = is_set(environment, "PET_MASTER_ADDR") || !is_set(environment, "MASTER_ADDR");
  const auto master = text_of(environment, is_of_trainer ? "PET_MASTER_ADDR" : "MASTER_ADDR");
  cluster.store =
      text(master, ":", number_of(environment, is_of_trainer ? "PET_MASTER_PORT" : "MASTER_PORT", 1, 65535));
  cluster.holds_store = world.rank == 0;
  return cluster;
}

// The plugins env and svc set these variables: https://volcano.sh/en/docs/user-guide/how_to_use_svc_plugin.
std::optional<Cluster> from_volcano(const Environment& environment, const std::vector<std::string>& names) {
  const auto tasks = tasks_of_volcano(environment, names);
  const char* const index = is_set(environment, "VC_TASK_INDEX") ? "VC_TASK_INDEX" : "VK_TASK_INDEX";
  const bool has_index = is_set(environment, index);
  if (tasks.empty() && !has_index) return std::nullopt;
  const auto fail = [&](const std::string& why) {
    throw ClusterError(text("Volcano: ", why, ". Give the Job the plugins env and svc and one task, or the plugin ",
                            "pytorch, or set ", kByHand, " in each pod"));
  };
  if (tasks.empty()) fail(text(index, " is \"", text_of(environment, index), "\", and no VC_<TASK>_HOSTS is set"));
  const auto& [variable, hosts] = *tasks.begin();
  if (!has_index) fail(text(variable, " is set, and VC_TASK_INDEX is not"));
  if (tasks.size() > 1) {
    fail(text("there are ", variable, " and ", std::next(tasks.begin())->first,
              ", and which task this pod is of is not told"));
  }
  Cluster cluster{.source = "Volcano"};
  auto& world = cluster.world;
  world.size = static_cast<int>(hosts.size());
  world.rank = number_of(environment, index, 0, world.size - 1);
  if (world.size == 1) return cluster;
  world.host = hosts[static_cast<std::size_t>(world.rank)];
  cluster.store = hosts[0];
  cluster.job = text("Volcano ", hosts[0]);
  cluster.holds_store = world.rank == 0;
  return cluster;
}

// Kubernetes tells a pod its number alone: https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static. The
// manifest must say how many pods there are, and the Service by which they find each other.
std::optional<Cluster> from_indexed_job(const Environment& environment) {
  const char* const name = "JOB_COMPLETION_INDEX";
  if (!is_set(environment, name)) return std::nullopt;
  Cluster cluster{.source = "the Indexed Job"};
  if (is_set(environment, "WORLD_SIZE") && number_of(environment, "WORLD_SIZE", 1, kMostRanks) == 1) return cluster;
  const auto fail = [&](const std::string& why) {
    throw ClusterError(text("JOB_COMPLETION_INDEX is \"", text_of(environment, name),
                            "\" (a pod of an Indexed Job), and ", why,
                            "; where each pod is to train alone, set WORLD_SIZE=1"));
  };
  for (const char* const of_a_set : {"JOBSET_NAME", "JOB_GLOBAL_INDEX", "JOB_INDEX"}) {
    if (!is_set(environment, of_a_set)) continue;
    fail(text(of_a_set, " is \"", text_of(environment, of_a_set),
              "\": in a JobSet that index counts within one of its ", "Jobs. Set ", kByHand, " in each pod"));
  }
  for (const char* const needed : {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (is_set(environment, needed)) continue;
    fail(text(needed, " is not set. Set WORLD_SIZE to the number of completions, MASTER_ADDR to the name of pod 0 ",
              "(JOB-0.SUBDOMAIN, where the pods' subdomain is a headless Service) and MASTER_PORT to a port"));
  }
  auto& world = cluster.world;
  world.size = number_of(environment, "WORLD_SIZE", 1, kMostRanks);
  world.rank = number_of(environment, name, 0, world.size - 1);
  world.host = text("pod ", world.rank);
  cluster.store = text(text_of(environment, "MASTER_ADDR"), ":", number_of(environment, "MASTER_PORT", 1, 65535));
  cluster.holds_store = world.rank == 0;
  return cluster;
}

// GKE's variables on the hosts of a TPU, which libtpu reads too:
// https://cloud.google.com/kubernetes-engine/docs/concepts/tpus.
std::optional<Cluster> from_tpu(const Environment& environment) {
  if (const char* const slices = environment("MEGASCALE_NUM_SLICES"); slices != nullptr && whole_number(slices) != 1) {
    throw ClusterError(text("MEGASCALE_NUM_SLICES is \"", slices, "\": a job trains on one slice of TPUs; unset it ",
                            "where each slice is to train a model of its own"));
  }
  const char* const set = environment("TPU_WORKER_HOSTNAMES");
  const std::string names = set == nullptr ? "" : set;
  std::vector<std::string> hosts;
  std::istringstream list(names);
  for (std::string host; std::getline(list, host, ',');) hosts.push_back(host);
  if (hosts.size() <= 1) {
    const char* const id = value_of(environment, "TPU_WORKER_ID");
    if (id == nullptr || whole_number(id) == 0) return std::nullopt;
    throw ClusterError(text("TPU_WORKER_ID is \"", id, "\", and TPU_WORKER_HOSTNAMES is \"", names,
                            "\": it must name the hosts of all of the TPU's workers, with commas between them"));
  }
  for (const auto& host : hosts) {
    if (host.empty()) throw ClusterError(text("TPU_WORKER_HOSTNAMES is \"", names, "\": a host's name is empty"));
  }
  Cluster cluster{.source = "TPU_WORKER_HOSTNAMES"};
  auto& world = cluster.world;
  world.size = static_cast<int>(hosts.size());
  if (environment("TPU_WORKER_ID") == nullptr) {
    throw ClusterError(text("TPU_WORKER_HOSTNAMES names ", hosts.size(),
                            " hosts, and TPU_WORKER_ID, the place of this ", "one in that list (from 0), is not set"));
  }
  world.rank = number_of(environment, "TPU_WORKER_ID", 0, world.size - 1);
  world.host = hosts[static_cast<std::size_t>(world.rank)];
  cluster.store = hosts[0];
  cluster.job = text("TPU of ", names);
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster
