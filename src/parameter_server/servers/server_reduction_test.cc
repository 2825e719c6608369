// Workers on threads and servers in this process, against replicas of one process in double precision.
#include "parameter_server/servers/server_reduction.h"

#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "gradient/gradient_path.h"
#include "gradient/net_testing.h"
#include "parameter_server/connection_in_process_testing.h"

namespace lockstep::servers {
namespace {

using namespace gradient;
using namespace parameter_server;

struct Servers {
  ModelSpec model;
  std::vector<ShardPlace> places;
  std::vector<std::shared_ptr<ServerConnection>> connections;
};

// Makes servers whose first values are those of the parameters.
Servers make_servers(int count, const ReplicatedParameters& parameters, const Optimizer& optimizer,
                     const UpdateMode& mode) {
  Servers servers{.model = {variables_of(parameters), tables_of(parameters)}};
  servers.places = place_shards(servers.model.variables, FixedShardsPartitioner(3), count);
  std::vector<const std::byte*> values;
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    if (!parameters.slots()[i].trainable) continue;
    values.push_back(static_cast<const std::byte*>(parameters.parameter(0, i).const_data_ptr()));
  }
  for (int server = 0; server < count; ++server) {
    const auto store =
        std::make_shared<ShardStore>(servers.model, servers.places, ServerNumber{server, count}, optimizer, mode);
    servers.connections.push_back(std::make_shared<ConnectionInProcess>(store));
  }
  Client(servers.model, servers.places, servers.connections).write(values, soon());
  return servers;
}

std::shared_ptr<ReplicatedParameters> make_parameters(int replicas, at::ScalarType dtype) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (int i = 0; i < replicas; ++i) modules.push_back(make_net(dtype));
  return std::make_shared<ReplicatedParameters>(modules, Placement::mirrored);
}

// Makes one process's part of a step, of `whole` parts in all: each replica has its share of the batch.
void step(GradientPath& path, const std::vector<Group>& groups, const Batch& batch, int first, int whole) {
  std::vector<std::jthread> threads;
  for (const auto& group : groups) {
    threads.emplace_back([&] {
      const auto size = batch.x.size(0);
      const auto begin = size * (first + group.rank()) / whole, end = size * (first + group.rank() + 1) / whole;
      if (end > begin) {
        auto& net = dynamic_cast<NetImpl&>(path.parameters().module(group.rank()));
        const auto out = net.forward(batch.x.narrow(0, begin, end - begin));
        (out - batch.y.narrow(0, begin, end - begin)).pow(2).sum().backward();
      }
      path.apply(group, static_cast<double>(end - begin), soon());
    });
  }
}

std::shared_ptr<ReplicatedParameters> mirrored(int replicas, const Optimizer& optimizer, const std::vector<Batch>& data,
                                               at::ScalarType dtype) {
  auto parameters = make_parameters(replicas, dtype);
  GradientPath path(parameters, optimizer);
  const auto groups = make_thread_groups(replicas);
  for (const auto& batch : data) step(path, groups, batch, 0, replicas);
  return parameters;
}

// Makes steps of which each worker computes one part.
std::shared_ptr<ReplicatedParameters> synchronous(int workers, int replicas, int servers_count,
                                                  const Optimizer& optimizer, const std::vector<Batch>& data,
                                                  at::ScalarType dtype) {
  auto result = make_parameters(replicas, dtype);
  const auto servers = make_servers(servers_count, *result, optimizer, {.parts = workers, .needed = workers});
  std::barrier steps(workers);
  std::vector<std::jthread> threads;
  std::vector<std::shared_ptr<ReplicatedParameters>> all{result};
  while (static_cast<int>(all.size()) < workers) all.push_back(make_parameters(replicas, dtype));
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      const auto client = std::make_shared<Client>(servers.model, servers.places, servers.connections);
      const auto& parameters = all[static_cast<std::size_t>(worker)];
      GradientPath path(parameters, optimizer, {.remote = std::make_shared<ServerValues>(*parameters, client, 600)});
      path.prepare();
      const auto groups = make_thread_groups(replicas);
      for (std::size_t i = 0; i < data.size(); ++i) {
        client->begin({.task = {static_cast<std::int64_t>(i), worker}});
        path.remote()->fetch_changed(soon());
        step(path, groups, data[i], worker * replicas, workers * replicas);
        steps.arrive_and_wait();
      }
      path.remote()->fetch(soon());
      EXPECT_EQ(path.updater().state_bytes(), 0);
    });
  }
  threads.clear();
  return result;
}

TEST(ServerReduction, SynchronousStepsGiveTheWeightsOfMirroredReplicas) {
  for (const auto& [name, optimizer] : optimizers()) {
    if (optimizer.options().clipnorm || optimizer.options().global_clipnorm) continue;
    const auto doubles = batches(50, at::kDouble), floats = batches(20, at::kFloat);
    const auto expected = mirrored(2, optimizer, doubles, at::kDouble);
    const auto expected_float = mirrored(2, optimizer, floats, at::kFloat);
    for (const auto& [workers, replicas, servers] : {std::tuple(2, 1, 1), std::tuple(3, 1, 2), std::tuple(2, 2, 3)}) {
      SCOPED_TRACE(testing::Message() << name << ", " << workers << " workers of " << replicas << " replicas, "
                                      << servers << " servers");
      expect_close(*expected, *synchronous(workers, replicas, servers, optimizer, doubles, at::kDouble), 1e-9);
      expect_close(*expected_float, *synchronous(workers, replicas, servers, optimizer, floats, at::kFloat), 1e-5);
    }
  }
}

}  // namespace
}  // namespace lockstep::servers
