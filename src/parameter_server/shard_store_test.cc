#include "parameter_server/shard_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"

namespace lockstep::parameter_server {
namespace {

using Values = std::vector<double>;

const std::vector<VariableSpec> kVariables{{"kernel", DType::float64, {4, 3}}, {"bias", DType::float64, {2}}};
constexpr std::size_t kElements = 14;

// Servers that have the variables in three shards, and what a worker does with them.
class Servers {
 public:
  Servers(int servers, const Optimizer& optimizer, const UpdateMode& mode, std::int64_t shard_bytes = 50)
      : places_(place_shards(kVariables, MaxSizePartitioner({.max_shard_bytes = shard_bytes}), servers)),
        states_(names_of_states(optimizer)) {
    for (int server = 0; server < servers; ++server) {
      stores_.push_back(
          std::make_unique<ShardStore>(ModelSpec{kVariables}, places_, ServerNumber{server}, optimizer, mode));
    }
  }

  ShardStore& store(int server) { return *stores_[static_cast<std::size_t>(server)]; }

  // Pushes to all servers, one after the other.
  void push(Push push, const Values& gradient) {
    const auto memory = std::make_shared<const Values>(gradient);
    for (int server = 0; server < static_cast<int>(stores_.size()); ++server) {
      push.gradients = pointers(server, *memory);
      push.memory = memory;
      store(server).push(push);
    }
  }

  std::vector<const std::byte*> pointers(int server, const Values& gradient) const {
    std::vector<const std::byte*> pointers;
    for (const auto& place : places_) {
      if (place.server == server) pointers.push_back(reinterpret_cast<const std::byte*>(&gradient[begin_of(place)]));
    }
    return pointers;
  }

  void save(int server, std::int64_t end, const std::string& path, Archive& main) {
    const auto name = text("1/", server, ".safetensors");
    ASSERT_TRUE(store(server).save(end, checkpoint::rows_folder(path) / name));
    std::vector<std::string> names;
    for (const auto& place : places_) {
      if (place.server != server) continue;
      for (const auto& own : rows_of(kVariables, place).names(states_)) names.push_back(own);
    }
    checkpoint::list_rows(main, name, names);
  }

  Values values() {
    Values values(kElements);
    std::vector<std::size_t> next(stores_.size());
    for (const auto& place : places_) {
      const auto server = static_cast<std::size_t>(place.server);
      stores_[server]->shard(next[server]++).read(reinterpret_cast<std::byte*>(&values[begin_of(place)]));
    }
    return values;
  }

 private:
  static std::size_t begin_of(const ShardPlace& place) {
    return static_cast<std::size_t>(place.begin) + (place.variable == 1 ? 12 : 0);
  }

  const std::vector<ShardPlace> places_;
  const std::vector<std::string> states_;
  std::vector<std::unique_ptr<ShardStore>> stores_;
};

Values gradient_of(std::int64_t step, int part) {
  Values gradient(kElements);
  for (std::size_t i = 0; i < kElements; ++i) {
    gradient[i] = std::sin(static_cast<double>(i) + 10.0 * static_cast<double>(step) + 100.0 * part);
  }
  return gradient;
}

TEST(ShardStore, EveryPushIsAnUpdateOfItsOwn) {
  Servers servers(2, SGD({.learning_rate = 0.5}), {});
  Values expected(kElements);
  for (std::int64_t step = 0; step < 6; ++step) {
    const auto gradient = gradient_of(step, 0);
    for (int repeated = 0; repeated < 2; ++repeated) servers.push({.task = {step}, .weight = 4}, gradient);
    for (std::size_t i = 0; i < kElements; ++i) expected[i] -= 0.5 * gradient[i] / 4;
  }
  const auto values = servers.values();
  for (std::size_t i = 0; i < kElements; ++i) EXPECT_NEAR(values[i], expected[i], 1e-14);
}

// A worker that is lost between two servers leaves half a step; the one that is given the step completes it.
TEST(ShardStore, AStepThatReachedSomeServersIsCompletedByAnotherWorker) {
  Servers servers(2, SGD({.learning_rate = 1}), {});
  const Values lost(kElements, 1), other(kElements, 3);
  servers.store(0).push({.task = {0}, .weight = 1, .gradients = servers.pointers(0, lost)});
  servers.push({.task = {0}, .weight = 1}, other);
  for (const double value : servers.values()) EXPECT_TRUE(value == -1 || value == -3) << value;
  for (int server = 0; server < 2; ++server) {
    for (std::size_t i = 0; i < servers.store(server).size(); ++i) {
      EXPECT_EQ(servers.store(server).shard(i).steps(), 1);
    }
  }
}

TEST(ShardStore, StepsOfSeveralPartsAreThoseOfOneLoopBitForBit) {
  constexpr int kParts = 3, kSteps = 20;
  const Adam adam({.learning_rate = 0.01});
  Servers servers(2, adam, {.parts = kParts, .needed = kParts}), one(1, adam, {});
  for (std::int64_t step = 0; step < kSteps; ++step) {
    {
      std::vector<std::jthread> workers;
      for (int part = 0; part < kParts; ++part) {
        workers.emplace_back([&, part] {
          servers.push({.task = {step, part}, .weight = 1.0 + part}, gradient_of(step, part));
        });
      }
    }
    Values sum(kElements);
    for (int part = 0; part < kParts; ++part) {
      const auto gradient = gradient_of(step, part);
      for (std::size_t i = 0; i < kElements; ++i) sum[i] += gradient[i];
    }
    one.push({.task = {step}, .weight = 6}, sum);
    ASSERT_EQ(servers.values(), one.values()) << step;
  }
}

TEST(ShardStore, APartThatIsNotNeededOrRepeatedIsDropped) {
  Servers servers(1, SGD({.learning_rate = 1}), {.parts = 3, .needed = 2});
  servers.push({.task = {0, 2}, .weight = 1}, Values(kElements, 5));
  servers.push({.task = {0, 2}, .weight = 1}, Values(kElements, 7));
  EXPECT_EQ(servers.values(), Values(kElements));
  servers.push({.task = {0, 0}, .weight = 1}, Values(kElements, 1));
  EXPECT_EQ(servers.values(), Values(kElements, -3));
  servers.push({.task = {0, 1}, .weight = 1}, Values(kElements, 100));
  EXPECT_EQ(servers.values(), Values(kElements, -3));
}

// One part of the divided batch had no examples, and one has no gradient for the bias.
TEST(ShardStore, PartsWithoutGradientsCountWithTheirWeights) {
  Servers servers(1, SGD({.learning_rate = 1}), {.parts = 3, .needed = 3});
  const Values gradient(kElements, 6);
  auto without_bias = servers.pointers(0, gradient);
  without_bias.back() = nullptr;
  servers.store(0).push({.task = {0, 0}, .weight = 2, .gradients = without_bias});
  servers.push({.task = {0, 1}, .weight = 0}, Values(kElements, NAN));
  servers.push({.task = {0, 2}, .weight = 1}, gradient);
  const auto values = servers.values();
  EXPECT_EQ(values[0], -4);
  EXPECT_EQ(values[kElements - 1], -2);
}

TEST(ShardStore, PushesThatDoNotFitAreNamed) {
  Servers servers(1, SGD(), {.parts = 2, .needed = 2});
  const auto message = [&](const Push& push) {
    return message_of<InvalidArgument>([&] { servers.store(0).push(push); });
  };
  const auto three = servers.pointers(0, Values(kElements));
  expect_says(message({.task = {4, 2}, .gradients = three}), "step 4, part 2, has a part that is not from 0 to 1");
  expect_says(message({.task = {-1}, .gradients = three}), "has a step below 0");
  expect_says(message({.task = {0}, .weight = -1, .gradients = three}), "has the weight -1; it must be 0 or more");
  expect_says(message({.task = {0}}), "has gradients of 0 shards; this server has 3");
  EXPECT_EQ(servers.values(), Values(kElements));
}

// The bytes of what `store` sends.
std::vector<std::byte> sent_by(ShardStore& store, std::int64_t transfer) {
  std::vector<std::byte> bytes;
  StateWriter writer([&](std::span<const std::byte> data) { bytes.insert(bytes.end(), data.begin(), data.end()); });
  store.send(transfer, writer);
  return bytes;
}

void receive(ShardStore& store, std::span<const std::byte> bytes) {
  StateReader reader([&](std::span<std::byte> data) {
    if (bytes.size() < data.size()) throw DataError("too short");
    std::copy_n(bytes.begin(), data.size(), data.begin());
    bytes = bytes.subspan(data.size());
  });
  store.receive(reader);
  EXPECT_TRUE(bytes.empty());
}

// The state is in the middle of a step of two parts, after a step given up and one that another chief gave out.
TEST(ShardStore, AServerThatReceivesAnothersStateGoesOnAsThatOne) {
  const UpdateMode mode{.parts = 2, .needed = 2};
  const Adam adam({.learning_rate = 0.1, .amsgrad = true});
  const std::vector<TableSpec> tables{
      {.name = "table", .dtype = DType::float64, .rows = 200, .width = 2, .admit_after = 2}};
  const auto places = place_shards(kVariables, {}, 1);
  ShardStore first({kVariables, tables}, places, {}, adam, mode), second({kVariables, tables}, places, {}, adam, mode);
  const auto push = [&](ShardStore& store, std::int64_t step, int part) {
    const auto gradient = gradient_of(step, part);
    const std::vector<std::int64_t> ids{step % 4, 10 + step % 3, 50 + step};
    const auto* const bytes = reinterpret_cast<const std::byte*>(gradient.data());
    return store.push({.task = {step, part},
                       .weight = 1,
                       .gradients = {bytes, part == 0 ? nullptr : bytes + 12 * sizeof(double)},
                       .rows = {{ids, bytes}},
                       .learning_rate = 0.2,
                       .chief = 2,
                       .finished = step > 3 ? 3 : 0});
  };
  for (const std::int64_t step : {0, 1, 3, 4, 5}) push(first, step, 0), push(first, step, 1);  // 2 never comes
  EXPECT_EQ(push(first, 6, 0), 0);
  receive(second, sent_by(first, 7));
  for (auto* const store : {&first, &second}) {
    EXPECT_EQ(push(*store, 6, 1), 7);
    EXPECT_EQ(push(*store, 6, 1), 7);  // again
    const Values none(kElements, 1e9);
    const auto* const bytes = reinterpret_cast<const std::byte*>(none.data());
    for (int part = 0; part < 2; ++part) {  // of a chief that was lost
      store->push({.task = {7, part}, .weight = 1, .gradients = {bytes, bytes}, .rows = {Rows()}, .chief = 1});
    }
    for (std::int64_t step = 8; step < 60; ++step) push(*store, step, 0), push(*store, step, 1);
  }
  EXPECT_TRUE(sent_by(first, 8) == sent_by(second, 8));
  EXPECT_EQ(first.shard(0).steps(), 58);
  expect_says(message_of<InvalidArgument>([&] { sent_by(first, 7); }), "transfer 7 of a server's state comes after");
}

TEST(ShardStore, TheStateOfOtherShardsIsRefused) {
  const SGD sgd;
  Servers one(1, sgd, {}), two(2, sgd, {});
  expect_says(message_of<DataError>([&] { receive(two.store(0), sent_by(one.store(0), 1)); }), "is expected");
}

// Saved by two servers, restored by one, which cuts the variables otherwise.
TEST(ShardStore, ACheckpointIsRestoredByOtherServersBitForBit) {
  const Adam adam({.learning_rate = 0.1});
  Servers saved(2, adam, {}), restored(1, adam, {}, 30);
  const auto folder = fresh_folder("shard_store", "restored").string();
  const auto gradient = [](int step) {
    Values values(kElements);
    for (std::size_t i = 0; i < kElements; ++i) values[i] = 0.1 * static_cast<double>(i) - 0.3 * step;
    return values;
  };
  for (int step = 0; step < 3; ++step) saved.push({.task = {step}, .weight = 1}, gradient(step));
  Archive main;
  main.entries["servers/steps"] = "3";
  for (int server = 0; server < 2; ++server) {
    EXPECT_FALSE(saved.store(server).save(3, folder + "/none"));
    saved.store(server).cut(3);
  }
  for (int server = 0; server < 2; ++server) saved.save(server, 3, folder + "/ckpt", main);
  write_archive(folder + "/ckpt", main);
  checkpoint::ShardedArchive archive(folder + "/ckpt");
  restored.store(0).restore(archive, {3, 3}, std::nullopt);
  EXPECT_EQ(restored.values(), Values(kElements));
  restored.store(0).restore(archive, {3, 3}, 0);
  for (auto* const servers : {&saved, &restored}) {
    servers->push({.task = {2}, .weight = 1}, gradient(2));  // they have it
    servers->push({.task = {3}, .weight = 1}, gradient(3));
  }
  EXPECT_EQ(restored.values(), saved.values());

  // A checkpoint in one file is restored as several are.
  write_archive(folder + "/whole", archive.whole());
  checkpoint::ShardedArchive whole(folder + "/whole");
  EXPECT_EQ(whole.main().tensor("kernel").shape, (std::vector<std::int64_t>{4, 3}));
  Servers third(2, adam, {});
  for (int server = 0; server < 2; ++server) third.store(server).restore(whole, {3, 3}, 0);
  third.push({.task = {3}, .weight = 1}, gradient(3));
  EXPECT_EQ(third.values(), saved.values());

  checkpoint::remove_checkpoint(folder + "/ckpt");
  EXPECT_FALSE(std::filesystem::exists(checkpoint::rows_folder(folder + "/ckpt")));
}

TEST(ShardStore, ACheckpointOfAnotherModelChangesNothing) {
  const SGD sgd({.momentum = 0.9});
  Servers servers(1, sgd, {});
  const auto folder = fresh_folder("shard_store", "other").string();
  const auto says = [&](const Archive& archive, const std::string& part) {
    write_archive(folder + "/ckpt", archive);
    expect_says(message_of<Error>([&] {
                  checkpoint::ShardedArchive read(folder + "/ckpt");
                  servers.store(0).restore(read, {3, 3}, 0);
                }),
                part);
    EXPECT_EQ(servers.values(), Values(kElements));
  };
  const auto tensor = [](std::vector<std::int64_t> shape, DType dtype = DType::float64) {
    std::size_t bytes = size_of(dtype);
    for (const auto size : shape) bytes *= static_cast<std::size_t>(size);
    return StoredTensor{dtype, std::move(shape), std::vector<std::byte>(bytes)};
  };
  Archive archive;
  says(archive, "has no row 0 of kernel");
  archive.tensors["kernel"] = tensor({1, 3});
  says(archive, "has no row 1 of kernel");
  archive.tensors["kernel"] = tensor({4, 2});
  says(archive, "of kernel are float64 [");
  archive.tensors["kernel"] = tensor({4, 3}, DType::float32);
  says(archive, "of kernel are float32 [");
  archive.tensors["kernel"] = tensor({4, 3});
  says(archive, "has no momentum of the optimizer for kernel, which is trained here: it was frozen");
  archive.entries["rows/../../elsewhere"] = "kernel[0:4]";
  says(archive, "among its files of rows");
  archive.entries.clear();
  archive.entries["rows/a/b"] = "kernel[4:0]";
  says(archive, "lists \"kernel[4:0]\"");
}

}  // namespace
}  // namespace lockstep::parameter_server
