#include <torch/nn/module.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "base/text.h"
#include "train/layers/stack.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

struct TableLine {
  std::string name, shape;
  std::int64_t parameters;
};

std::string shape_of(const std::vector<std::int64_t>& sizes, const char* first) {
  std::string shape = text("(", first);
  for (const auto size : sizes) shape += text(shape.size() > 1 ? ", " : "", size);
  return shape + ")";
}

std::string with_commas(std::int64_t number) {
  const auto digits = std::to_string(number);
  std::string result;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) result.push_back(',');
    result.push_back(digits[i]);
  }
  return result;
}

std::vector<TableLine> lines_of(const torch::nn::Module& module, const ReplicatedParameters& parameters) {
  std::vector<TableLine> lines;
  if (const auto* stack = dynamic_cast<const train::StackModule*>(&module)) {
    for (const auto& line : stack->lines()) {
      lines.push_back({text(line.name, " (", line.kind, ")"), shape_of(line.output, "None"), line.parameters});
    }
  } else {
    for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
      const auto sizes = parameters.whole_sizes(i);
      lines.push_back({parameters.slots()[i].name, shape_of(sizes, ""), c10::multiply_integers(sizes)});
    }
  }
  return lines;
}

}  // namespace

std::string Model::summary() const {
  impl_->require_built("summary");
  const auto& parameters = *impl_->parameters;
  const auto lines = lines_of(parameters.module(0), parameters);
  std::size_t names = 38, shapes = 24;
  for (const auto& line : lines) {
    names = std::max(names, line.name.size());
    shapes = std::max(shapes, line.shape.size());
  }
  std::ostringstream out;
  const auto print = [&](const std::string& name, const std::string& shape, const std::string& count) {
    out << std::left << std::setw(static_cast<int>(names) + 2) << name << std::setw(static_cast<int>(shapes) + 2)
        << shape << std::right << std::setw(14) << count << '\n';
  };
  const std::string rule(names + shapes + 18, '-');
  const bool stack = dynamic_cast<const train::StackModule*>(&parameters.module(0)) != nullptr;
  print(stack ? "Layer (type)" : "Parameter", stack ? "Output shape" : "Shape", "Param #");
  out << rule << '\n';
  for (const auto& line : lines) print(line.name, line.shape, with_commas(line.parameters));
  out << rule << '\n';
  std::int64_t trainable = 0, frozen = 0;
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    (parameters.slots()[i].trainable ? trainable : frozen) += c10::multiply_integers(parameters.whole_sizes(i));
  }
  // As in Keras, these are changed by training, but not by gradients, such as BatchNorm's running statistics.
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    const auto& buffer = parameters.buffer(0, i);
    if (buffer.is_floating_point()) frozen += buffer.numel();
  }
  out << "Total params: " << with_commas(trainable + frozen) << "\nTrainable params: " << with_commas(trainable)
      << "\nNon-trainable params: " << with_commas(frozen) << '\n';
  return out.str();
}

}  // namespace lockstep
