#include "parameter_server/table_shard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <unordered_map>

#include "base/expect_says_testing.h"

namespace lockstep::parameter_server {
namespace {

using Ids = std::vector<std::int64_t>;
using Values = std::vector<double>;

TableSpec table_of(std::int64_t rows, std::int64_t width) {
  return {.name = "table", .dtype = DType::float64, .rows = rows, .width = width, .seed = 3};
}

Values read(const TableShard& shard, const Ids& ids) {
  Values values(ids.size() * static_cast<std::size_t>(shard.table().width));
  shard.read(ids, reinterpret_cast<std::byte*>(values.data()));
  return values;
}

bool apply(TableShard& shard, std::int64_t step, const Ids& ids, const Values& gradients, double divide_by = 1) {
  return shard.apply(step, {ids, reinterpret_cast<const std::byte*>(gradients.data())}, divide_by, {});
}

// Some ids of a table, each once, and a gradient for each of their elements.
struct Batch {
  Batch(std::mt19937& random, const TableSpec& table, std::size_t count) {
    std::uniform_int_distribution<std::int64_t> id(0, table.rows - 1);
    std::normal_distribution<double> gradient;
    std::set<std::int64_t> chosen;
    while (chosen.size() < count) chosen.insert(id(random));
    ids.assign(chosen.begin(), chosen.end());
    std::shuffle(ids.begin(), ids.end(), random);
    for (std::size_t i = 0; i < count * static_cast<std::size_t>(table.width); ++i)
      gradients.push_back(gradient(random));
  }
  Ids ids;
  Values gradients;
};

std::map<std::int64_t, Values> rows_in(const TableShard& shard, const TableShard::ClosedCut& cut) {
  std::map<std::int64_t, Values> rows;
  shard.for_each(cut, [&](const TableShard::StoredRow& row) {
    Values data(static_cast<std::size_t>(2 * shard.table().width));  // values, and one state
    std::memcpy(data.data(), row.data, data.size() * sizeof(double));
    rows[row.id] = data;
  });
  return rows;
}

TEST(IdMap, AgreesWithTheStandardLibrary) {
  std::mt19937 random(7);
  IdMap map;
  std::unordered_map<std::int64_t, std::uint32_t> plain;
  for (int i = 0; i < 200'000; ++i) {
    const auto id = static_cast<std::int64_t>(random() % 5000) * 4096;  // a pattern, as ids of hashed features have
    if (random() % 3 == 0) {
      map.erase(id);
      plain.erase(id);
    } else {
      EXPECT_EQ(map.insert(id, static_cast<std::uint32_t>(i)), plain.try_emplace(id, i).first->second);
    }
    ASSERT_EQ(map.size(), plain.size());
  }
  for (std::int64_t id = 0; id < 5000 * 4096; id += 4096) {
    const auto* const found = map.find(id);
    ASSERT_EQ(found != nullptr, plain.contains(id));
    EXPECT_EQ(found == nullptr ? 0 : *found, found == nullptr ? 0 : plain[id]);
  }
}

TEST(Table, InitialValuesDependOnSeedAndRowAlone) {
  auto table = table_of(1'000'000'000, 1000);
  const auto row = [&](std::int64_t id) {
    Values values(1000);
    write_initial_values(table, id, reinterpret_cast<std::byte*>(values.data()));
    return values;
  };
  const auto first = row(999'999'999);
  EXPECT_EQ(first, row(999'999'999));
  EXPECT_NE(first, row(999'999'998));
  const auto moments = [](const Values& values) {
    double sum = 0, squares = 0;
    for (const double value : values) {
      sum += value;
      squares += value * value;
    }
    return std::pair(sum / 1000, std::sqrt(squares / 1000));
  };
  EXPECT_NEAR(moments(first).first, 0, 0.005);
  EXPECT_NEAR(moments(first).second, 0.05 / std::sqrt(3), 0.002);
  EXPECT_LE(*std::max_element(first.begin(), first.end()), 0.05);
  table.initializer = "normal";
  EXPECT_NEAR(moments(row(5)).first, 0, 0.008);
  EXPECT_NEAR(moments(row(5)).second, 0.05, 0.004);
  table.initializer = "ones";
  EXPECT_EQ(row(5), Values(1000, 1));
  table.seed = 4;
  table.initializer = "uniform";
  EXPECT_NE(first, row(999'999'999));
  expect_says(message_of<InvalidArgument>([&] { RowInitializer("glorot"); }), "\"glorot\"");
  expect_says(message_of<InvalidArgument>([&] { RowInitializer("glorot"); }), "\"uniform\"");
  expect_says(message_of<InvalidArgument>([&] { RowInitializer(RowInitializer::Kind::normal, -1); }), "-1");
  expect_says(message_of<InvalidArgument>([&] { RowInitializer(RowInitializer::Kind::normal, -1); }), "above 0");
}

TEST(SumOfRows, AddsUpRowsWithOneId) {
  const auto table = table_of(10, 2);
  const Ids first{7, 2}, second{2, 5, 7};
  const Values a{1, 2, 3, 4}, b{10, 20, 30, 40, 50, 60};
  const std::array parts{Rows{first, reinterpret_cast<const std::byte*>(a.data())},
                         Rows{second, reinterpret_cast<const std::byte*>(b.data())}};
  const SumOfRows sum(table, parts);
  const auto rows = sum.rows();
  EXPECT_EQ(Ids(rows.ids.begin(), rows.ids.end()), (Ids{7, 2, 5}));
  const auto* const values = reinterpret_cast<const double*>(rows.values);
  EXPECT_EQ(Values(values, values + 6), (Values{51, 62, 13, 24, 30, 40}));
}

// Adagrad of Keras on the rows of a batch alone, in a plain loop.
TEST(TableShard, MovesTheRowsOfABatchAsAPlainLoopWould) {
  const auto table = table_of(5000, 3);
  TableShard shard(table, Adagrad({.learning_rate = 0.1}));
  std::map<std::int64_t, Values> values, sums;
  std::mt19937 random(1);
  for (std::int64_t step = 0; step < 30; ++step) {
    const Batch batch(random, table, 700);
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      const auto id = batch.ids[i];
      if (!values.contains(id)) {
        values[id] = Values(3);
        write_initial_values(table, id, reinterpret_cast<std::byte*>(values[id].data()));
        sums[id] = Values(3, 0.1);
      }
      for (std::size_t k = 0; k < 3; ++k) {
        const double gradient = batch.gradients[3 * i + k] / 4;
        sums[id][k] += gradient * gradient;
        values[id][k] -= 0.1 * gradient / std::sqrt(sums[id][k] + 1e-7);
      }
    }
    EXPECT_TRUE(apply(shard, step, batch.ids, batch.gradients, 4));
    EXPECT_FALSE(apply(shard, step, batch.ids, batch.gradients, 4));
  }
  EXPECT_EQ(shard.size(), values.size());
  EXPECT_EQ(shard.version(), 30);
  for (const auto& [id, expected] : values) {
    const auto found = read(shard, {id});
    for (std::size_t k = 0; k < 3; ++k) ASSERT_NEAR(found[k], expected[k], 1e-12);
  }
}

TEST(TableShard, ReadingMakesNoRow) {
  TableShard shard(table_of(1'000'000'000, 4), "adam");
  EXPECT_EQ(read(shard, {5, 999'999'999}).size(), 8);
  EXPECT_EQ(shard.size(), 0);
}

TEST(TableShard, RefusesIdsOutOfRange) {
  TableShard shard(table_of(10, 1), "sgd");
  expect_says(message_of<InvalidArgument>([&] { read(shard, {3, 10}); }), "id 10");
  expect_says(message_of<InvalidArgument>([&] { read(shard, {3, 10}); }), "\"table\"");
  expect_says(message_of<InvalidArgument>([&] { read(shard, {-1}); }), "id -1");
  expect_says(message_of<InvalidArgument>([&] { apply(shard, 0, {1, 11}, {1, 1}); }), "id 11");
  EXPECT_EQ(shard.size(), 0);
  EXPECT_TRUE(apply(shard, 0, {1}, {1}));
}

TEST(TableShard, AdmitsARowByTheNumberOfItsUpdates) {
  auto table = table_of(100, 1);
  table.initializer = "zeros";
  table.admit_after = 3;
  TableShard shard(table, SGD({.learning_rate = 1}));
  for (std::int64_t step = 0; step < 2; ++step) apply(shard, step, {7, 8}, {1, 1});
  EXPECT_EQ(shard.size(), 0);
  EXPECT_EQ(read(shard, {7}), Values{0});
  apply(shard, 2, {7}, {1});
  EXPECT_EQ(read(shard, {7, 8}), (Values{-1, 0}));
  EXPECT_EQ(shard.size(), 1);
}

TEST(TableShard, ForgetsUpdatesOfRowsThatAreRare) {
  auto table = table_of(100'000, 1);
  table.admit_after = 2;
  table.evict_after = 9;
  TableShard shard(table, SGD());
  for (std::int64_t step = 0; step < 200; ++step) apply(shard, step, {step % 50}, {1});  // each every 50 steps
  EXPECT_EQ(shard.size(), 0);
  for (std::int64_t step = 200; step < 240; ++step) apply(shard, step, {step % 4}, {1});
  EXPECT_EQ(shard.size(), 4);
}

TEST(TableShard, EvictsRowsThatWereNotUpdatedForLong) {
  auto table = table_of(100'000, 1);
  table.evict_after = 40;
  TableShard shard(table, SGD({.learning_rate = 1}));
  std::int64_t most = 0;
  for (std::int64_t step = 0; step < 400; ++step) {
    apply(shard, step, {1, 100 + step}, {1, 1});  // one row always, others once
    most = std::max(most, static_cast<std::int64_t>(shard.size()));
  }
  EXPECT_LE(most, 1 + 50);
  EXPECT_GE(most, 1 + 39);
  Values initial(1);
  write_initial_values(table, 110, reinterpret_cast<std::byte*>(initial.data()));
  EXPECT_EQ(read(shard, {110}), initial);
  EXPECT_LT(read(shard, {1})[0], -399);
}

TEST(TableShard, ACutHasTheStepsBelowItsEndWhateverComesLater) {
  const auto table = table_of(300, 2);
  const auto optimizer = Adagrad({.learning_rate = 0.1});
  std::mt19937 random(5);
  std::vector<Batch> batches;
  for (int step = 0; step < 40; ++step) batches.emplace_back(random, table, 40);
  const auto give = [&](TableShard& shard, std::int64_t step) {
    const auto& batch = batches[static_cast<std::size_t>(step)];
    apply(shard, step, batch.ids, batch.gradients);
  };
  // Steps 0 to 9, but for 3 and 8, come before the cut of those below 12. Step 8 never comes.
  TableShard cut(table, optimizer), plain(table, optimizer);
  for (const std::int64_t step : {0, 1, 2, 4, 5, 6, 7, 9}) give(cut, step);
  EXPECT_FALSE(cut.close_cut(12));
  cut.cut(12);
  for (const std::int64_t step : {14, 3, 11, 12, 10}) give(cut, step);
  for (const std::int64_t step : {0, 1, 2, 4, 5, 6, 7, 9, 3, 11, 10}) give(plain, step);
  const auto closed = *cut.close_cut(12);
  plain.cut(12);
  const auto expected = rows_in(plain, *plain.close_cut(12));
  for (const std::int64_t step : {13, 15, 16, 20}) give(cut, step);
  EXPECT_EQ(closed.rows, expected.size());
  EXPECT_EQ(rows_in(cut, closed), expected);
  EXPECT_EQ(rows_in(cut, closed), expected);  // again

  // Another shard goes on from it.
  TableShard restored(table, optimizer);
  give(restored, 30);
  restored.clear();
  cut.for_each(closed, [&](const auto& row) { restored.add_row(row); });
  restored.begin_at({12, 12});
  cut.cut(12);
  cut.end_cut(closed);  // not the new one
  EXPECT_TRUE(cut.close_cut(12));
  expect_says(message_of<Error>([&] { rows_in(cut, closed); }), "begun anew");
  EXPECT_EQ(restored.size(), closed.rows);
  EXPECT_EQ(restored.version(), 12);
  for (const std::int64_t step : {11, 12, 13}) {
    give(restored, step);
    give(plain, step);
  }
  Ids all(300);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  EXPECT_EQ(read(restored, all), read(plain, all));
}

TEST(TableShard, RefusesATableThatIsNone) {
  expect_says(message_of<InvalidArgument>([&] { TableShard(table_of(0, 1), "sgd"); }), "\"table\"");
  expect_says(message_of<InvalidArgument>([&] { TableShard(table_of(0, 1), "sgd"); }), "rows");
  expect_says(message_of<InvalidArgument>([&] { TableShard(table_of(1, 0), "sgd"); }), "width");
  expect_says(message_of<InvalidArgument>([&] { TableShard(table_of(1, 0), "sgd"); }), "0");
  expect_says(message_of<InvalidArgument>([&] { TableShard(table_of(1, 1), SGD({.clipnorm = 1})); }), "clipnorm");
}

}  // namespace
}  // namespace lockstep::parameter_server
