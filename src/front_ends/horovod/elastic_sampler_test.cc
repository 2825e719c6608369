#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "base/expect_says_testing.h"
#include "front_ends/horovod/ranks_testing.h"
#include "lockstep/base/error.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod::elastic {
namespace {

// Counts how often the ranks have each index.
std::map<std::int64_t, int> counts(int ranks, const std::function<std::vector<std::int64_t>(ElasticSampler&)>& take) {
  std::map<std::int64_t, int> all;
  std::mutex mutex;
  on_ranks(ranks, [&](int) {
    ElasticSampler sampler(10);
    const auto mine = take(sampler);
    const std::lock_guard lock(mutex);
    for (const auto index : mine) ++all[index];
  });
  return all;
}

TEST(ElasticSamplers, DivideTheIndicesAmongTheRanks) {
  const auto all = counts(3, [](ElasticSampler& sampler) {
    EXPECT_EQ(sampler.indices().size(), 4U);  // two come twice
    EXPECT_EQ(sampler.batches(3), 2);
    EXPECT_EQ(sampler.get_indices(1, 3).size(), 1U);
    return sampler.indices();
  });
  EXPECT_EQ(all.size(), 10U);
  for (const auto& [index, times] : all) EXPECT_LE(times, 2) << index;
}

TEST(ElasticSamplers, DivideWhatIsLeftAfterAReset) {
  const auto all = counts(2, [](ElasticSampler& sampler) {
    auto mine = sampler.get_indices(0, 2);
    sampler.record_batch(0, 2);
    sampler.reset();
    EXPECT_EQ(sampler.indices().size(), 3U);
    mine.insert(mine.end(), sampler.indices().begin(), sampler.indices().end());
    return mine;
  });
  EXPECT_EQ(all.size(), 10U);
  for (const auto& [index, times] : all) EXPECT_EQ(times, 1) << index;
}

TEST(ElasticSamplers, ShuffleAnewInEachEpochAndGoOnFromTheirState) {
  on_ranks(2, [](int) {
    ElasticSampler sampler(100), in_order(100, false), other(100);
    EXPECT_NE(sampler.indices(), in_order.indices());
    const auto first = sampler.indices();
    sampler.set_epoch(1);
    EXPECT_NE(sampler.indices(), first);
    sampler.record_batch(4, 5);
    Archive archive;
    sampler.trackable().save(archive, "sampler");
    sampler.reset();
    other.trackable().load(archive, "sampler")();
    EXPECT_EQ(other.indices(), sampler.indices());
    EXPECT_EQ(other.indices().size(), 25U);
  });
}

TEST(ElasticSamplers, RefuseWhatIsNoDataSet) {
  on_ranks(1, [](int) {
    expect_says(message_of<InvalidArgument>([] { ElasticSampler(0); }), "dataset_size is 0; it must be at least 1");
  });
}

}  // namespace
}  // namespace lockstep::horovod::elastic
