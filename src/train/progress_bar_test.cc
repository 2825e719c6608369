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

TEST(ProgressBar, AnEpochsLastLineLosesNoValue) {
  Logs logs;
  for (const char* name : {"accuracy", "loss", "precision", "val_accuracy", "val_loss", "val_precision"})
    logs.set(name, 0.5);
  const std::string first = " - accuracy: 0.5000 - loss: 0.5000 - precision: 0.5000",
                    second = " - val_accuracy: 0.5000 - val_loss: 0.5000 - val_precision: 0.5000";
  EXPECT_EQ(fit_lines("938/938", kBar, kTimes, logs, 200), "938/938 " + kBar + kTimes + first + second);
  EXPECT_EQ(fit_lines("938/938", kBar, kTimes, logs, 79), "938/938" + kTimes + first + "\n   " + second);
  EXPECT_EQ(fit_lines("1", "", "", logs, 2).find("..."), std::string::npos);  // no terminal is so narrow
}

TEST(ProgressBar, ACutIsBetweenCharacters) {
  EXPECT_EQ(fit_line("1", "", "", " - größe: 0.1", 10), "1 - grö...");
  EXPECT_EQ(fit_line("1", "", "", " - größe: 0.1", 14), "1 - größe: 0.1");
  EXPECT_EQ(fit_line("12345", "", "", "", 2), "...");  // no terminal is so narrow
}

}  // namespace
}  // namespace lockstep::train
