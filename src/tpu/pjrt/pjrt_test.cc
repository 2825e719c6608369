// Programs by hand, on the devices of a plugin for CPUs.
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <thread>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "tpu/pjrt/client.h"
#include "tpu/pjrt/executable.h"
#include "tpu/pjrt/stablehlo.h"

namespace lockstep::pjrt {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

std::shared_ptr<Client> cpu(std::int64_t devices) {
  return Client::create(Plugin::load(CPU_PLUGIN), soon(), {{"cpu_device_count", devices}});
}

std::vector<float> floats(const Buffer& buffer) {
  std::vector<float> values(static_cast<std::size_t>(buffer.shape().elements()));
  buffer.copy_to_host(values.data(), values.size() * sizeof(float), soon());
  return values;
}

// Adds the values of all replicas.
std::string sum_over(int replicas) {
  std::string ranks = "0";
  for (int i = 1; i < replicas; ++i) ranks += text(",", i);
  return text(R"(
module @sum attributes {mhlo.num_replicas = )",
              replicas, R"( : i32} {
  func.func public @main(%arg: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %sum = "stablehlo.all_reduce"(%arg) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %ab = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %ab : tensor<f32>
    }) {replica_groups = dense<[[)",
              ranks, "]]> : tensor<1x", replicas, R"(xi64>} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    return %sum : tensor<2x3xf32>
  }
})");
}

// A step of a training: the first argument becomes the result.
constexpr const char* kAddInPlace = R"(
module @add {
  func.func public @main(%to: tensor<1024xf32> {tf.aliasing_output = 0 : i32}, %by: tensor<1024xf32>) -> tensor<1024xf32> {
    %sum = stablehlo.add %to, %by : tensor<1024xf32>
    return %sum : tensor<1024xf32>
  }
})";

TEST(Pjrt, ValuesGoToADeviceAndBack) {
  const auto client = cpu(2);
  EXPECT_EQ(client->platform(), "cpu");
  EXPECT_EQ(client->process(), 0);
  EXPECT_EQ(client->devices_of_all_processes().size(), 2);
  ASSERT_EQ(client->devices().size(), 2U);
  const std::vector<std::int64_t> values{-1, 5, 1LL << 40};
  const Shape shape{DType::int64, {3, 1}};
  const auto buffer = client->copy_to_device(values.data(), shape, client->devices()[1]);
  EXPECT_EQ(buffer.shape(), shape);
  std::vector<std::int64_t> back(3);
  buffer.copy_to_host(back.data(), 24, soon());
  EXPECT_EQ(back, values);
  expect_says(message_of<InvalidArgument>([&] { buffer.copy_to_host(back.data(), 16, soon()); }),
              "the memory has 16 bytes, the value 24");
}

TEST(Pjrt, ReplicasAddTheirValues) {
  for (const int replicas : {1, 2, 8}) {
    const auto client = cpu(replicas);
    const auto sum = Executable::compile(client, sum_over(replicas), {.replicas = replicas});
    ASSERT_EQ(static_cast<int>(sum.devices().size()), replicas);
    std::vector<Buffer> values;
    std::vector<std::vector<const Buffer*>> arguments;
    values.reserve(static_cast<std::size_t>(replicas));
    for (int i = 0; i < replicas; ++i) {
      std::vector<float> of_replica(6);
      std::iota(of_replica.begin(), of_replica.end(), static_cast<float>(10 * i));
      values.push_back(
          client->copy_to_device(of_replica.data(), {.sizes = {2, 3}}, sum.devices()[static_cast<std::size_t>(i)]));
      arguments.push_back({&values.back()});
    }
    const auto outputs = sum.run(arguments).outputs;
    for (const auto& of_replica : outputs) {
      const auto found = floats(of_replica.at(0));
      for (int i = 0; i < 6; ++i)
        EXPECT_EQ(found[static_cast<std::size_t>(i)],
                  static_cast<float>(replicas * i + 10 * replicas * (replicas - 1) / 2));
    }
  }
}

TEST(Pjrt, AnAliasedArgumentBecomesTheOutput) {
  const auto client = cpu(1);
  const auto add = Executable::compile(client, kAddInPlace, {});
  const auto needs = add.program().memory();
  EXPECT_EQ(needs.arguments, 2 * 4096);
  EXPECT_EQ(needs.aliased, 4096);
  EXPECT_EQ(needs.total() - needs.temporary - needs.code, 2 * 4096);
  EXPECT_GE(add.program().flops(), 1024);
  const std::vector<float> zeros(1024), ones(1024, 1);
  const auto by = client->copy_to_device(ones.data(), {.sizes = {1024}}, client->devices()[0]);
  auto to = client->copy_to_device(zeros.data(), {.sizes = {1024}}, client->devices()[0]);
  for (int step = 0; step < 100; ++step) {
    auto outputs = add.run({{&to, &by}}).outputs;
    to = std::move(outputs[0][0]);
  }
  EXPECT_EQ(floats(to), std::vector<float>(1024, 100));
}

TEST(Pjrt, ACompiledProgramIsLoadedAgain) {
  const auto client = cpu(2);
  const auto serialized = Executable::compile(client, sum_over(2), {.replicas = 2}).program().serialize();
  const auto again = Executable::load(client, serialized);
  const std::vector<float> ones(6, 1);
  const auto first = client->copy_to_device(ones.data(), {.sizes = {2, 3}}, again.devices()[0]);
  const auto second = client->copy_to_device(ones.data(), {.sizes = {2, 3}}, again.devices()[1]);
  EXPECT_EQ(floats(again.run({{&first}, {&second}}).outputs[1][0]), std::vector<float>(6, 2));
  expect_says(message_of<DeviceError>([&] { Executable::load(client, serialized.substr(0, serialized.size() / 2)); }),
              "load a compiled program: ");
}

TEST(Pjrt, WhatIsMadeOfAClientKeepsIt) {
  auto client = cpu(1);
  auto add = std::make_unique<Executable>(Executable::compile(client, kAddInPlace, {}));
  const std::vector<float> ones(1024, 1);
  const auto a = client->copy_to_device(ones.data(), {.sizes = {1024}}, client->devices()[0]);
  const auto b = client->copy_to_device(ones.data(), {.sizes = {1024}}, client->devices()[0]);
  client.reset();
  const auto run = add->run({{&a, &b}});
  run.ends.at(0).wait(soon(), "run a program");
  add.reset();
  EXPECT_EQ(floats(run.outputs[0][0]), std::vector<float>(1024, 2));
}

TEST(Pjrt, BadProgramsAreNamedByTheCompiler) {
  const auto client = cpu(1);
  expect_says(message_of<DeviceError>([&] { Executable::compile(client, "module {", {}); }), "compile a program: ");
  expect_says(message_of<DeviceError>([&] { Executable::compile(client, sum_over(4), {.replicas = 4}); }),
              "compile a program: ");
  const auto add = Executable::compile(client, kAddInPlace, {});
  const std::vector<float> ones(6, 1);
  const auto small = client->copy_to_device(ones.data(), {.sizes = {6}}, client->devices()[0]);
  expect_says(message_of<DeviceError>([&] { add.run({{&small, &small}}); }), "run a program: ");
  expect_says(message_of<DeviceError>([&] { add.run({{&small}}); }), "run a program: ");
  expect_says(message_of<InvalidArgument>([&] { add.run({}); }), "there are 0 lists of arguments for 1 devices");
}

TEST(Pjrt, BadPluginsAreNamed) {
  expect_says(message_of<DeviceError>([] { Plugin::load("/nowhere/libtpu.so"); }),
              "there is no PJRT plugin /nowhere/libtpu.so: ");
  expect_says(message_of<DeviceError>([] { Plugin::load("libz.so.1"); }), "libz.so.1 is no PJRT plugin");
  expect_says(message_of<DeviceError>([] { Plugin::load("/etc/passwd"); }),
              "/etc/passwd cannot be loaded as a PJRT plugin: ");
  expect_says(message_of<DeviceError>([] { Plugin::load(OTHER_PLUGIN); }), " has version 7.0 of the PJRT API");
}

TEST(Pjrt, ThePathIsTheOptionsElseTheEnvironments) {
  EXPECT_EQ(plugin_path("asked.so"), "asked.so");
  ::setenv("PJRT_PLUGIN_LIBRARY_PATH", "/from/environment.so", 1);
  EXPECT_EQ(plugin_path(""), "/from/environment.so");
  ::unsetenv("PJRT_PLUGIN_LIBRARY_PATH");
  EXPECT_EQ(plugin_path(""), "libtpu.so");
}

TEST(Pjrt, OptionsAreTheProgramsElseTheEnvironments) {
  setenv("PJRT_PLUGIN_OPTIONS", "cpu_device_count=8,fast=true,kind=a=b", 1);
  EXPECT_EQ(plugin_options({}), (Options{{"cpu_device_count", std::int64_t{8}}, {"fast", true}, {"kind", "a=b"}}));
  EXPECT_EQ(plugin_options({{"own", true}}), (Options{{"own", true}}));
  setenv("PJRT_PLUGIN_OPTIONS", "8", 1);
  expect_says(message_of<InvalidArgument>([] { plugin_options({}); }), "\"8\" is not name=value");
  unsetenv("PJRT_PLUGIN_OPTIONS");
}

TEST(Pjrt, APluginThatNeverOpensItsDevicesIsGivenUpAtTheDeadline) {
  const auto& plugin = Plugin::load(SILENT_PLUGIN);
  expect_says(
      message_of<DeadlineExceeded>([&] { Client::create(plugin, Deadline::after(std::chrono::milliseconds(20))); }),
      text(plugin.path(), ": open the devices: gave up after 0.02"));
}

TEST(Pjrt, WorkThatNeverEndsIsGivenUpAtTheDeadline) {
  const Event event(Plugin::load(SILENT_PLUGIN), nullptr);
  expect_says(message_of<DeadlineExceeded>(
                  [&] { event.wait(Deadline::after(std::chrono::milliseconds(20)), "run a program"); }),
              "run a program");
}

// On devices that wait for each other.
TEST(Pjrt, AFailureOfOneDeviceIsFoundWhileAnotherNeverEnds) {
  const auto& plugin = Plugin::load(SILENT_PLUGIN);
  PJRT_Event* const fails = reinterpret_cast<PJRT_Event*>(1);
  for (const std::size_t failing : {0U, 1U}) {
    std::vector<Event> events;
    for (std::size_t i = 0; i < 2; ++i) events.emplace_back(plugin, i == failing ? fails : nullptr);
    const auto began = Deadline::Clock::now();
    const auto wait = [&] {
      Event::wait_for_all(events, soon(), std::chrono::milliseconds(20), "run a program", [] { FAIL(); });
    };
    expect_says(message_of<DeviceError>(wait), "run a program: the chip halted (UNAVAILABLE)");
    EXPECT_LT(Deadline::Clock::now() - began, std::chrono::seconds(30));
    EXPECT_TRUE(events[failing].has_ended());
    EXPECT_FALSE(events[1 - failing].has_ended());
  }
}

TEST(Pjrt, WhoWaitsForSeveralDevicesIsAskedWhetherToGoOn) {
  std::vector<Event> events;
  for (int i = 0; i < 2; ++i) events.emplace_back(Plugin::load(SILENT_PLUGIN), nullptr);
  const auto wait = [&](Deadline deadline, const std::function<void()>& check) {
    Event::wait_for_all(events, deadline, std::chrono::milliseconds(20), "run a program", check);
  };
  expect_says(message_of<ClusterError>([&] { wait(soon(), [] { throw ClusterError("a worker is lost"); }); }),
              "a worker is lost");
  expect_says(message_of<DeadlineExceeded>([&] { wait(Deadline::after(std::chrono::milliseconds(20)), {}); }),
              "run a program: gave up after 0.02");
}

TEST(Pjrt, TransposedProductsAreProductsInTheOtherOrder) {
  const auto product_of = [](ProgramText& text) {
    const auto a = text.argument({DType::float32, {2, 3}});
    return text.dot(a, text.argument({DType::float32, {3, 4}}), {1}, {0});
  };
  ProgramText alone;
  const auto program = alone.finish({alone.transpose(product_of(alone), {1, 0})}, {}, 1);
  EXPECT_EQ(program.find("transpose"), std::string::npos) << program;
  ProgramText both;
  const auto product = product_of(both);
  const auto transposed = both.transpose(product, {1, 0});
  const auto client = cpu(1);
  const auto compiled = Executable::compile(client, both.finish({product, transposed}, {}, 1), {});
  const std::vector<float> a{1, 2, 3, 4, 5, 6}, b{1, 0, 2, 0, 0, 1, 0, 2, 3, 0, 0, 1};
  const auto on_device_a = client->copy_to_device(a.data(), {.sizes = {2, 3}}, client->devices()[0]);
  const auto on_device_b = client->copy_to_device(b.data(), {.sizes = {3, 4}}, client->devices()[0]);
  const auto results = compiled.run({{&on_device_a, &on_device_b}}).outputs;
  EXPECT_EQ(floats(results[0][0]), (std::vector<float>{10, 2, 2, 7, 22, 5, 8, 16}));
  EXPECT_EQ(floats(results[0][1]), (std::vector<float>{10, 22, 2, 5, 2, 8, 7, 16}));
}

}  // namespace
}  // namespace lockstep::pjrt
