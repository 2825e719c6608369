#include "elastic/members.h"

#include <gtest/gtest.h>

namespace lockstep::elastic {
namespace {

using Ranks = std::vector<int>;

TEST(Rows, WholeModelsAreRowsOfOne) { EXPECT_EQ(whole_rows(Ranks{0, 2, 5}, 1), (Ranks{0, 2, 5})); }

TEST(Rows, ARowThatHasLostARankIsLeftOut) {
  EXPECT_EQ(whole_rows(Ranks{0, 1, 3, 4, 5}, 2), (Ranks{0, 1, 4, 5}));
  EXPECT_EQ(whole_rows(Ranks{0, 1}, 2), (Ranks{0, 1}));
  EXPECT_EQ(whole_rows(Ranks{1}, 2), Ranks());
}

TEST(Rows, RowsThatHaveLostDifferentPartsArePutTogether) {
  EXPECT_EQ(whole_rows(Ranks{1, 2, 4, 5}, 2), (Ranks{4, 5, 2, 1}));  // parts 1 and 0 of the rows 0 and 1
  EXPECT_EQ(whole_rows(Ranks{1, 3, 4, 5}, 2), (Ranks{4, 5}));        // both have lost part 0
  EXPECT_EQ(whole_rows(Ranks{0, 4, 8}, 3), Ranks({0, 4, 8}));        // three rows of one rank each
  EXPECT_EQ(whole_rows(Ranks{0, 1, 3, 4, 8}, 3), Ranks({0, 1, 8}));  // two have the same parts: one goes on
}

TEST(Rows, NewcomersComeInWholeRows) {
  const auto newcomer = [](const char* name, int part) { return Process{.name = name, .host = "a", .part = part}; };
  std::string order;
  for (const auto& process :
       whole_rows({newcomer("a", 1), newcomer("b", 0), newcomer("c", 0), newcomer("d", 0), newcomer("e", 1)}, 2))
    order += process.name;
  EXPECT_EQ(order, "bace");
  EXPECT_TRUE(whole_rows({newcomer("a", 1), newcomer("e", 1), newcomer("f", 2)}, 2).empty());
}

}  // namespace
}  // namespace lockstep::elastic
