// TF_CONFIG, as tf.distribute.cluster_resolver.TFConfigClusterResolver reads it:
//   {"cluster": {"chief": ["host:port"], "worker": [...], "ps": [...]}, "task": {"type": "worker", "index": 0}}
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kLongest = 1 << 20;
constexpr int kDeepest = 8;

[[noreturn]] void fail(const std::string& what) { throw ClusterError("TF_CONFIG: " + what); }

Json parse(const std::string& text_of_it) {
  if (text_of_it.size() > kLongest) fail(text("it has ", text_of_it.size(), " bytes; at most ", kLongest));
  bool deep = false;
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    deep = deep || depth > kDeepest;
    return !deep;
  };
  auto json = Json::parse(text_of_it, shallow, /*allow_exceptions=*/false);
  if (deep) fail(text("it is nested deeper than ", kDeepest, " levels"));
  if (!json.is_object()) fail("it is not a JSON object");
  return json;
}

const Json& member(const Json& json, const char* name, const char* path) {
  if (!json.contains(name)) fail(text(path, " is missing"));
  return json[name];
}

std::vector<std::string> addresses(const Json& list, const std::string& field) {
  if (!list.is_array()) fail(text(field, " is not a list of \"host:port\""));
  std::vector<std::string> all;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto place = text(field, "[", i, "]");
    if (!list[i].is_string()) fail(text(place, " is not a string"));
    all.push_back(list[i].get<std::string>());
    host_of(all.back(), "TF_CONFIG: " + place);
  }
  return all;
}

}  // namespace

Cluster parse_tf_config(const std::string& json) {
  const auto config = parse(json);
  const auto& cluster = member(config, "cluster", "cluster");
  if (!cluster.is_object()) fail("cluster is not an object");
  Cluster result{.source = "TF_CONFIG"};
  for (const auto& [type, list] : cluster.items()) {
    const std::string known = type == "master" ? "chief" : type;  // as older versions called it
    if (known != "chief" && known != "worker" && known != "ps" && known != "evaluator") {
      fail(text("cluster has \"", type, "\"; there are chief, worker, ps and evaluator"));
    }
    if (result.jobs.contains(known)) fail("cluster has both \"chief\" and \"master\"");
    result.jobs[known] = addresses(list, "cluster." + type);
    result.tasks[known] = static_cast<int>(result.jobs[known].size());
  }
  const auto& task = member(config, "task", "task");
  const auto& type = member(task, "type", "task.type");
  if (!type.is_string()) fail("task.type is not a string");
  result.task_type = type.get<std::string>() == "master" ? "chief" : type.get<std::string>();
  if (!result.jobs.contains(result.task_type))
    fail(text("task.type is \"", result.task_type, "\", which is not in cluster"));
  const auto& index = member(task, "index", "task.index");
  const auto count = result.jobs[result.task_type].size();
  if (!index.is_number_integer() || index.get<std::int64_t>() < 0 ||
      index.get<std::int64_t>() >= static_cast<std::int64_t>(count)) {
    fail(text("task.index is ", index.dump(), "; cluster.", result.task_type, " has ", count, " entries"));
  }
  result.task_index = index.get<int>();
  return result;
}

// The chief is rank 0; where there is none, worker 0 is the chief.
std::optional<Cluster> from_tf_config(const Environment& environment) {
  const char* const value = value_of(environment, "TF_CONFIG");
  if (value == nullptr) return std::nullopt;
  auto cluster = parse_tf_config(value);
  auto members = cluster.jobs["chief"];
  const auto chiefs = members.size();
  if (chiefs > 1) fail(text("cluster.chief has ", chiefs, " entries; there is one chief"));
  members.insert(members.end(), cluster.jobs["worker"].begin(), cluster.jobs["worker"].end());
  auto sorted = members;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail(text("cluster has ", *twice, " twice"));
  if (cluster.task_type != "chief" && cluster.task_type != "worker") return cluster;  // alone, or a server

  const auto address_of_rank_0 = members[0];
  auto& world = cluster.world;
  world.size = static_cast<int>(members.size());
  world.rank = cluster.task_index + (cluster.task_type == "worker" ? static_cast<int>(chiefs) : 0);
  for (auto& member : members) member = host_of(member, "TF_CONFIG");
  set_host(world, members);
  if (world.size == 1) return cluster;
  cluster.store = address_of_rank_0;
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster
