#include "../examples/arguments.h"

#include <gtest/gtest.h>

namespace {

struct Values {
  int epochs = 12;
  std::uint64_t seed = 0;
  double memory = 1.5;
  std::string device = "cpu";
  bool elastic = false;
  std::vector<std::string> files;
};

Arguments arguments_of(Values& values) {
  Arguments arguments("A program");
  arguments.option("--epochs", values.epochs, "passes over the data").from(1);
  arguments.option("--seed", values.seed);
  arguments.option("--memory", values.memory).from(0, 8);
  arguments.option("--device", values.device, "where").one_of({"cpu", "cuda"});
  arguments.flag("--elastic", values.elastic, "goes on");
  arguments.words("files", values.files).required();
  return arguments;
}

Values values_after(const std::vector<std::string>& words) {
  Values values;
  EXPECT_TRUE(arguments_of(values).read(words));
  return values;
}

std::string error_of(const std::vector<std::string>& words) {
  Values values;
  try {
    arguments_of(values).read(words);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "none";
}

TEST(Arguments, AreReadInBothForms) {
  const auto values = values_after(
      {"a", "--epochs", "3", "--seed=18446744073709551615", "--memory=0.25", "--elastic", "b=c", "--device", "cuda"});
  EXPECT_EQ(values.epochs, 3);
  EXPECT_EQ(values.seed, 18446744073709551615U);
  EXPECT_EQ(values.memory, 0.25);
  EXPECT_EQ(values.device, "cuda");
  EXPECT_TRUE(values.elastic);
  EXPECT_EQ(values.files, (std::vector<std::string>{"a", "b=c"}));
}

TEST(Arguments, KeepDefaults) {
  const auto values = values_after({"a"});
  EXPECT_EQ(values.epochs, 12);
  EXPECT_FALSE(values.elastic);
}

TEST(Arguments, ThatAreWrongAreNamed) {
  EXPECT_EQ(error_of({"a", "--epoch", "3"}), "unknown argument '--epoch'");
  EXPECT_EQ(error_of({"a", "--epochs", "3x"}), "--epochs '3x': must be a whole number from 1 to 2147483647");
  EXPECT_EQ(error_of({"a", "--epochs=0"}), "--epochs '0': must be a whole number from 1 to 2147483647");
  EXPECT_EQ(error_of({"a", "--epochs=3000000000"}),
            "--epochs '3000000000': must be a whole number from 1 to 2147483647");
  EXPECT_EQ(error_of({"a", "--memory", "nan"}), "--memory 'nan': must be a number from 0 to 8");
  EXPECT_EQ(error_of({"a", "--epochs", "3", "--epochs", "4"}), "--epochs is given twice");
  EXPECT_EQ(error_of({"a", "--epochs"}), "--epochs needs a value");
  EXPECT_EQ(error_of({"a", "--device", "tpu"}), "--device 'tpu': must be one of cpu, cuda");
  EXPECT_EQ(error_of({"a", "--elastic=yes"}), "--elastic takes no value");
  EXPECT_EQ(error_of({"--elastic"}), "files is required");
}

TEST(Arguments, EndTheProgramWithHelpOrAnError) {
  Values values;
  const char* help[] = {"program", "--help"};
  EXPECT_EXIT(arguments_of(values).parse(2, help), testing::ExitedWithCode(0), "");
  const char* wrong[] = {"program", "--nothing"};
  EXPECT_EXIT(arguments_of(values).parse(2, wrong), testing::ExitedWithCode(2),
              "program: unknown argument '--nothing'; see --help");
}

TEST(Arguments, HelpHasNamesDefaultsAndTexts) {
  Values values;
  EXPECT_EQ(arguments_of(values).help(),
            "A program\n"
            "  --epochs VALUE [12]: passes over the data\n"
            "  --seed VALUE [0]\n"
            "  --memory VALUE [1.5]\n"
            "  --device VALUE [cpu]: where; one of cpu, cuda\n"
            "  --elastic: goes on\n"
            "  files (required)\n");
}

}  // namespace
