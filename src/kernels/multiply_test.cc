// Products against plain loops in double, in arrays of exactly their sizes.
#include "kernels/matrix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/each_target_testing.h"

namespace lockstep::kernels {
namespace {

std::vector<float> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = uniform(generator);
  return values;
}

TEST(Multiply, IsTheProduct) {
  for (const auto& [m, n, k] : std::vector<std::tuple<int, int, int>>{{64, 64, 1000},
                                                                      {64, 10, 64},
                                                                      {7, 33, 5},
                                                                      {65, 97, 513},
                                                                      {130, 31, 77},
                                                                      {2, 8, 1024},
                                                                      {600, 50, 64},
                                                                      {70, 530, 520}}) {
    for (const int transposed : {0, 1, 2}) {  // none, a, b
      SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", transposed " << transposed);
      const auto a = random_values(m * k, 1), b = random_values(k * n, 2);
      std::vector<float> c(static_cast<std::size_t>(m * n), 99);
      ASSERT_TRUE(multiply(m, n, k, {a.data(), transposed == 1 ? m : k, transposed == 1},
                           {b.data(), transposed == 2 ? k : n, transposed == 2}, c.data(), n));
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          double expected = 0;
          for (int p = 0; p < k; ++p) {
            const double left = a[static_cast<std::size_t>(transposed == 1 ? p * m + i : i * k + p)];
            expected += left * b[static_cast<std::size_t>(transposed == 2 ? j * k + p : p * n + j)];
          }
          ASSERT_NEAR(c[static_cast<std::size_t>(i * n + j)], expected, 1e-5 * std::sqrt(k)) << i << ", " << j;
        }
      }
    }
  }
}

// Equal bits make a step with one replica and one with many alike.
TEST(Multiply, AnElementHasTheSameBitsInALargeProductAsInASmallOne) {
  constexpr int kRows = 160, kColumns = 600, kDepth = 1100, kFew = 3;
  const auto a = random_values(kRows * kDepth, 1), b = random_values(kDepth * kColumns, 2);
  std::vector<float> whole(std::size_t{kRows} * kColumns), few(std::size_t{kFew} * kColumns);
  ASSERT_TRUE(multiply(kRows, kColumns, kDepth, {a.data(), kDepth}, {b.data(), kDepth, true}, whole.data(), kColumns));
  for (const int row : {0, 63, kRows - kFew}) {
    const float* const from = a.data() + row * kDepth;
    ASSERT_TRUE(multiply(kFew, kColumns, kDepth, {from, kDepth}, {b.data(), kDepth, true}, few.data(), kColumns));
    EXPECT_TRUE(std::equal(few.begin(), few.end(), whole.begin() + row * kColumns)) << row;
  }
}

TEST(Transpose, SwapsRowsAndColumns) {
  for_each_target([] {
    for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 9}, {8, 8}, {13, 6}, {23, 21}, {169, 32}}) {
      const auto from = random_values(rows * columns, 1);
      std::vector<float> to(from.size());
      transpose(from.data(), columns, rows, columns, to.data(), rows);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
          ASSERT_EQ(to[static_cast<std::size_t>(j * rows + i)], from[static_cast<std::size_t>(i * columns + j)]);
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::kernels
