#include "elastic/rows.h"

#include <gtest/gtest.h>

namespace lockstep::elastic {
namespace {

using Ranks = std::vector<int>;

TEST(Rows, WholeModelsAreRowsOfOne) { EXPECT_EQ(whole_rows({0, 2, 5}, 1), (Ranks{0, 2, 5})); }

TEST(Rows, ARowThatHasLostARankIsLeftOut) {
  EXPECT_EQ(whole_rows({0, 1, 3, 4, 5}, 2), (Ranks{0, 1, 4, 5}));
  EXPECT_EQ(whole_rows({0, 1}, 2), (Ranks{0, 1}));
  EXPECT_EQ(whole_rows({1}, 2), Ranks());
}

TEST(Rows, RowsThatHaveLostDifferentPartsArePutTogether) {
  EXPECT_EQ(whole_rows({1, 2, 4, 5}, 2), (Ranks{4, 5, 2, 1}));      // parts 1 and 0 of the rows 0 and 1
  EXPECT_EQ(whole_rows({1, 3, 4, 5}, 2), (Ranks{4, 5}));            // both have lost part 0
  EXPECT_EQ(whole_rows({0, 4, 8}, 3), Ranks({0, 4, 8}));            // three rows of one rank each
  EXPECT_EQ(whole_rows({0, 1, 3, 4, 8}, 3), Ranks({0, 1, 8}));      // of two with the same parts one goes on
}

}  // namespace
}  // namespace lockstep::elastic
