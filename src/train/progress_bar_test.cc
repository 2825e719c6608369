#include "train/callbacks/progress_bar.h"

#include <gtest/gtest.h>

namespace lockstep::train {
namespace {

const std::string kBar = "━━━━━━━━━━──────────", kTimes = " 12s 25ms/step";
const std::string kValues = " - accuracy: 0.9123 - loss: 0.2345 - precision: 0.9012 - recall: 0.8901 - val: 0.1";

TEST(ProgressBar, ALineFitsTheTerminal) {
  const std::string whole = "469/938 " + kBar + kTimes + kValues;
  EXPECT_EQ(fit_line("469/938", kBar, kTimes, kValues, 200), whole);
  EXPECT_EQ(fit_line("469/938", kBar, kTimes, kValues, 28 + 14 + 82), whole);
  EXPECT_EQ(fit_line("469/938", kBar, kTimes, kValues, 28 + 14 + 81), "469/938" + kTimes + kValues);
  EXPECT_EQ(fit_line("469/938", kBar, kTimes, kValues, 7 + 14 + 81), "469/938" + kValues);
  EXPECT_EQ(fit_line("469/938", kBar, kTimes, kValues, 79), ("469/938" + kValues).substr(0, 76) + "...");
}

TEST(ProgressBar, ACutIsBetweenCharacters) {
  EXPECT_EQ(fit_line("1", "", "", " - größe: 0.1", 10), "1 - grö...");
  EXPECT_EQ(fit_line("1", "", "", " - größe: 0.1", 14), "1 - größe: 0.1");
  EXPECT_EQ(fit_line("12345", "", "", "", 2), "...");  // no terminal is so narrow
}

}  // namespace
}  // namespace lockstep::train
