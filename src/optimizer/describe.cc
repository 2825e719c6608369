#include "optimizer/describe.h"

#include <array>
#include <iomanip>
#include <limits>

#include "base/text.h"

namespace lockstep::optimizer {
namespace {

std::string exact(double number) { return text(std::setprecision(std::numeric_limits<double>::max_digits10), number); }

std::string text_of(const std::optional<double>& setting) { return setting ? exact(*setting) : "none"; }

std::string states_of(const UpdateRule& rule) {
  std::vector<std::string> all;
  for (const auto& state : rule.states()) all.push_back(text(state.name, " from ", state.initial_value));
  return all.empty() ? "none" : join(all);
}

// Three numbers after two updates.
std::string result_of(const Optimizer& optimizer) {
  constexpr std::array<double, 3> kGradient{0.1, -3, 2e-4};
  constexpr int kUpdates = 2;
  constexpr double kRate = 0.01;
  std::array<double, 3> value{0.5, -2, 1e-3};
  std::vector<std::array<double, 3>> states;
  std::vector<double*> pointers;
  for (const auto& spec : optimizer.rule().states()) {
    states.emplace_back().fill(spec.initial_value);
  }
  for (auto& state : states) pointers.push_back(state.data());
  for (int update = 1; update <= kUpdates; ++update) {
    optimizer.rule().update({.iteration = update, .learning_rate = kRate}, std::span<double>(value),
                            std::span<const double>(kGradient), pointers);
  }
  return text(exact(value[0]), ", ", exact(value[1]), ", ", exact(value[2]));
}

}  // namespace

std::string describe(const Optimizer& optimizer) {
  const auto& options = optimizer.options();
  std::vector<std::string> rates;
  for (const std::int64_t iteration : {0, 1, 1000}) rates.push_back(exact(options.learning_rate.at(iteration)));
  const auto& scale = options.loss_scale;
  const auto& ranks = options.gradient_ranks;
  return text("rule ", optimizer.rule().name(), "\nstates ", states_of(optimizer.rule()),
              "\nlearning rates at iterations 0, 1, 1000 ", join(rates), "\nweight_decay ",
              text_of(options.weight_decay), "\nclipnorm ", text_of(options.clipnorm), "\nclipvalue ",
              text_of(options.clipvalue), "\nglobal_clipnorm ", text_of(options.global_clipnorm), "\nloss scale ",
              scale ? text(scale->initial_scale, " growing every ", scale->dynamic_growth_steps) : "none",
              "\ngradient_ranks ",
              ranks ? text("own_data ", ranks->own_data, ", sum ", ranks->sum, ", gradient_dtype ",
                           ranks->gradient_dtype ? name_of(*ranks->gradient_dtype) : "none")
                    : "none",
              "\nhyperparameters, by what three numbers become ", result_of(optimizer));
}

}  // namespace lockstep::optimizer
