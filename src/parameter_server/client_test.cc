#include "parameter_server/client.h"

#include <gtest/gtest.h>

#include "base/expect_says_testing.h"
#include "parameter_server/connection_in_process_testing.h"

namespace lockstep::parameter_server {
namespace {

const ModelSpec kModel{.variables = {{"a", DType::float64, {1}}, {"b", DType::float64, {1}}}};

// A server that cannot be reached for a number of pushes.
class Unreachable final : public ConnectionInProcess {
 public:
  using ConnectionInProcess::ConnectionInProcess;
  int pushes_lost = 0;
  bool has_other_copy = false;  // that can be reached

  std::int64_t push(Push push, Deadline deadline) override {
    if (pushes_lost-- > 0 && has_other_copy) throw IncompleteUpdate("one of two copies has the change");
    if (pushes_lost >= 0) throw DeadlineExceeded("calling ps 1", std::chrono::seconds(1));
    return ConnectionInProcess::push(std::move(push), deadline);
  }
};

TEST(Client, APushThatReachedSomeServersCanBeCompleted) {
  const auto places = place_shards(kModel.variables, {}, 2);
  std::vector<std::shared_ptr<Unreachable>> servers;
  for (const int server : {0, 1}) {
    servers.push_back(std::make_shared<Unreachable>(std::make_shared<ShardStore>(
        kModel, places, ServerNumber{server, 2}, SGD({.learning_rate = 1}), UpdateMode())));
  }
  Client client(kModel, places, {servers.begin(), servers.end()});
  const double gradient = -1;
  const auto push = [&] {
    client.begin({.task = {7}});
    const std::vector gradients(2, reinterpret_cast<const std::byte*>(&gradient));
    client.push({.weight = 1}, gradients, Deadline::after(std::chrono::seconds(10)));
  };
  const auto steps = [&] {
    return std::pair(servers[0]->store->shard(0).steps(), servers[1]->store->shard(0).steps());
  };

  servers[0]->pushes_lost = servers[1]->pushes_lost = 1;
  EXPECT_THROW(push(), DeadlineExceeded);  // none has it
  EXPECT_EQ(steps(), std::pair(0L, 0L));

  servers[0]->pushes_lost = 0;
  servers[1]->pushes_lost = 1;
  expect_says(message_of<IncompleteUpdate>(push), "step 7 has updated variables on 1 of 2 servers: calling ps 1");
  EXPECT_EQ(steps(), std::pair(1L, 0L));
  push();
  EXPECT_EQ(steps(), std::pair(1L, 1L));

  // The first server's error is not that of the one of which a copy has the update.
  servers[0]->pushes_lost = servers[1]->pushes_lost = 1;
  servers[1]->has_other_copy = true;
  EXPECT_THROW(push(), IncompleteUpdate);
}

}  // namespace
}  // namespace lockstep::parameter_server
