// Compares partitioners with TensorFlow 2.20's on the same variables.
#include "lockstep/parameter_server/partitioner.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/expect_says_testing.h"
#include "parameter_server/shard_places.h"

namespace lockstep::parameter_server {
namespace {

std::int64_t shards(const Partitioner& partitioner, const std::vector<std::int64_t>& shape,
                    DType dtype = DType::float32) {
  return partitioner(shape, dtype);
}

TEST(Partitioner, FixedShards) {
  EXPECT_EQ(shards(FixedShardsPartitioner(2), {10, 3}), 2);
  EXPECT_EQ(shards(FixedShardsPartitioner(4), {3}), 3);
}

TEST(Partitioner, MinSize) {
  EXPECT_EQ(shards(MinSizePartitioner({.min_shard_bytes = 4, .max_shards = 2}), {6, 1}), 2);
  EXPECT_EQ(shards(MinSizePartitioner({.min_shard_bytes = 4, .max_shards = 10}), {6, 1}), 6);
  EXPECT_EQ(shards(MinSizePartitioner({.max_shards = 100}), {1024, 1024}), 16);
  EXPECT_EQ(shards(MinSizePartitioner({.max_shards = 100}), {1024, 1024}, DType::float64), 32);
  EXPECT_EQ(shards(MinSizePartitioner({.min_shard_bytes = 1000, .max_shards = 100}), {501}), 3);  // rounded up
  EXPECT_EQ(shards(MinSizePartitioner(), {1024, 1024}), 1);
}

TEST(Partitioner, MaxSize) {
  EXPECT_EQ(shards(MaxSizePartitioner({.max_shard_bytes = 4}), {6, 1}), 6);
  EXPECT_EQ(shards(MaxSizePartitioner({.max_shard_bytes = 4, .max_shards = 2}), {6, 1}), 2);
  EXPECT_EQ(shards(MaxSizePartitioner({.max_shard_bytes = 1024}), {6, 1}), 1);
  EXPECT_EQ(shards(MaxSizePartitioner({.max_shard_bytes = 100}), {7, 10}), 4);  // 2 rows of 40 bytes in each
  EXPECT_EQ(shards(MaxSizePartitioner({.max_shard_bytes = 1}), {7, 10}), 7);    // a row is larger
}

TEST(Partitioner, OptionsBelow1AreNamed) {
  expect_says(message_of<InvalidArgument>([] { FixedShardsPartitioner(0); }), "num_shards is 0; it must be at least 1");
  expect_says(message_of<InvalidArgument>([] { MinSizePartitioner({.min_shard_bytes = 0}); }), "min_shard_bytes is 0");
  expect_says(message_of<InvalidArgument>([] { MinSizePartitioner({.max_shards = -1}); }), "max_shards is -1");
  expect_says(message_of<InvalidArgument>([] { MaxSizePartitioner({.max_shard_bytes = 0}); }), "max_shard_bytes is 0");
  expect_says(message_of<InvalidArgument>([] { MaxSizePartitioner({.max_shard_bytes = 1, .max_shards = 0}); }),
              "max_shards is 0");
}

TEST(ShardPlaces, CoverEachVariableOnceInWholeRows) {
  const std::vector<VariableSpec> variables{
      {"kernel", DType::float32, {7, 3}}, {"bias", DType::float64, {2}}, {"scale", DType::float32, {}}};
  const auto places = place_shards(variables, FixedShardsPartitioner(3), 2);
  ASSERT_EQ(places.size(), 3 + 2 + 1);
  const std::vector<std::int64_t> begins{0, 9, 15, 0, 1, 0}, counts{9, 6, 6, 1, 1, 1};
  const std::vector<std::size_t> of{0, 0, 0, 1, 1, 2};
  for (std::size_t i = 0; i < places.size(); ++i) {
    EXPECT_EQ(places[i].variable, of[i]) << i;
    EXPECT_EQ(places[i].begin, begins[i]) << i;
    EXPECT_EQ(places[i].count, counts[i]) << i;
  }
}

TEST(ShardPlaces, ServersHaveNearlyEqualBytes) {
  std::vector<VariableSpec> variables;
  for (std::int64_t i = 1; i <= 40; ++i) {
    variables.push_back({"w" + std::to_string(i), i % 3 == 0 ? DType::float64 : DType::float32, {i * 37 % 100 + 1, 8}});
  }
  std::vector<std::int64_t> bytes(3);
  for (const auto& place : place_shards(variables, {}, 3)) {
    bytes[static_cast<std::size_t>(place.server)] +=
        place.count * static_cast<std::int64_t>(size_of(variables[place.variable].dtype));
  }
  const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
  EXPECT_LE(*most, *least * 1.05);
}

TEST(ShardPlaces, APartitionerThatCutsTooFinelyIsNamed) {
  const auto message = message_of<InvalidArgument>([] {
    place_shards(
        {{"bias", DType::float32, {2}}}, [](auto, auto) { return 3; }, 1);
  });
  expect_says(message, "\"bias\" into 3 shards; it has 2 rows");
}

}  // namespace
}  // namespace lockstep::parameter_server
