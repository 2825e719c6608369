#include "parameter_server/model_server.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "parameter_server/connection_in_process_testing.h"
#include "parameter_server/served_models.h"

namespace lockstep::parameter_server {
namespace {

const ModelSpec kServedModel{.variables = {{"a", DType::float64, {1}}, {"b", DType::float64, {1}}}};

Deadline soon_enough() { return Deadline::after(std::chrono::seconds(10)); }

// Server 0 of two, which was started again.
class RestartedServer : public testing::Test {
 protected:
  static std::shared_ptr<ShardStore> make(int server) {
    return std::make_shared<ShardStore>(kServedModel, place_shards(kServedModel.variables, {}, 2),
                                        ServerNumber{server, 2}, SGD({.learning_rate = 1}), UpdateMode());
  }

  // The store says this of the model.
  void serve(const std::string& status) {
    store_.set(key_of_model(0), status, soon_enough());
    kept_ = server_.serve(
        {0, "a model", make, [this](int server, bool second_copies, std::int64_t number, ShardStore& to, Deadline) {
           return transfer_(server, second_copies, number, to);
         }});
  }

  static double value(const ServedModels& models) {
    double value = 0;
    std::vector<std::int64_t> versions;
    models.wait_for_values(0, soon_enough())->pull(std::vector{reinterpret_cast<std::byte*>(&value)}, versions);
    return value;
  }

  static void set(ShardStore& shards, double value) { shards.write(std::vector{reinterpret_cast<std::byte*>(&value)}); }

  // A checkpoint in which both variables are `value`.
  std::string checkpoint_with(double value) const {
    Archive archive;
    for (const auto* const name : {"a", "b"}) {
      archive.tensors[name] = {DType::float64, {1}, std::vector<std::byte>(sizeof value)};
      std::memcpy(archive.tensors[name].bytes.data(), &value, sizeof value);
    }
    archive.entries = {{"servers/steps", "3"}, {"servers/model", "0"}};
    const auto path = checkpoint_file((folder_ / "checkpoint").string());
    write_archive(path, archive);
    return print(SavedModel{path, 0});
  }

  const std::filesystem::path folder_ = fresh_folder("model_server", "restarted");
  const Store store_ = Store::hold("127.0.0.1:0", {.token = std::string(32, 't')});
  ModelServer server_{{.mine = Role::ps, .index = 0, .workers = 1, .servers = 2}, 2, store_, 5};
  std::function<bool(int server, bool second_copies, std::int64_t number, ShardStore& to)> transfer_;
  std::shared_ptr<void> kept_;
};

// The copy on the other server dies while it sends its state: then the whole state is the checkpoint's.
TEST_F(RestartedServer, ATransferThatBreaksOffLeavesNothing) {
  bool second_is_there = false;
  transfer_ = [&](int server, bool second_copies, std::int64_t number, ShardStore& to) {
    const auto sent = make(server);
    set(*sent, 7);
    std::vector<std::byte> state;
    StateWriter writer([&](std::span<const std::byte> data) { state.insert(state.end(), data.begin(), data.end()); });
    sent->send(number, writer);
    std::size_t at_servers = 0;
    StateReader reader([&](std::span<std::byte> data) {
      if (second_copies && at_servers > 40) throw DataError("it broke off");
      std::copy_n(state.begin() + static_cast<std::ptrdiff_t>(at_servers), data.size(), data.begin());
      at_servers += data.size();
    });
    if (!second_copies && !std::exchange(second_is_there, true)) return false;  // its server has not restored it yet
    try {
      to.receive(reader);
    } catch (const DataError&) {
      return false;
    }
    return true;
  };
  serve(checkpoint_with(5));
  EXPECT_EQ(value(*server_.models()), 5);
  EXPECT_EQ(server_.models()->find(0)->push({.task = {3}, .weight = 1, .gradients = {nullptr}}), 0);
  EXPECT_EQ(value(*server_.second_copies()), 7);  // the first copy's, for which it has waited
  EXPECT_GT(server_.second_copies()->find(0)->push({.task = {3}, .weight = 1, .gradients = {nullptr}}), 0);
}

TEST_F(RestartedServer, ASecondCopyWaitsForTheFirstOneAndNotForEver) {
  transfer_ = [](int, bool, std::int64_t, ShardStore&) { return false; };
  ModelServer impatient({.mine = Role::ps, .index = 0, .workers = 1, .servers = 2}, 2, store_, 0.2);
  store_.set(key_of_model(0), checkpoint_with(5), soon_enough());
  const ModelServer::Model model{0, "a model", make, [](auto&&...) { return false; }};
  expect_says(message_of<DeadlineExceeded>([&] { impatient.serve(model); }),
              "waiting for ps 1's shards of model number 0");
}

TEST_F(RestartedServer, WithFirstValuesAloneItGetsThemFromTheOtherOrTheChief) {
  transfer_ = [](int, bool second_copies, std::int64_t, ShardStore& to) {
    if (!second_copies) set(to, 3);
    return !second_copies;
  };
  serve(kWritten);
  EXPECT_EQ(server_.models()->find_written(0), nullptr);
  EXPECT_EQ(value(*server_.second_copies()), 3);
}

TEST_F(RestartedServer, WithoutACheckpointItSaysSo) {
  transfer_ = [](int, bool, std::int64_t, ShardStore&) { return false; };
  expect_says(message_of<ClusterError>([&] { serve(kTrained); }), "there is no checkpoint from which to restore its");
}

TEST_F(RestartedServer, ACheckpointThatAnotherModelHasReplacedIsRefused) {
  transfer_ = [](int, bool, std::int64_t, ShardStore&) { return false; };
  const auto saved = parse_checkpoint(checkpoint_with(5));
  expect_says(message_of<InvalidArgument>([&] {
                serve(print(SavedModel{saved.path, 1}));
              }),
              "is of another model now (number 0 of the program)");
}

}  // namespace
}  // namespace lockstep::parameter_server
