// A program of several steps: one function that is the step, and a loop that calls it.
#include "base/text.h"
#include "tpu/pjrt/stablehlo.h"

namespace lockstep::pjrt {
namespace {

Shape stacked(const Shape& shape, int steps) {
  Shape result{shape.dtype, {steps}};
  result.sizes.insert(result.sizes.end(), shape.sizes.begin(), shape.sizes.end());
  return result;
}

// The operands of a slice at `step`, the first index, of a value of that rank: zeros are the other indices.
std::vector<Value> with_indices(std::vector<Value> operands, const Value& step, const Value& zero, std::size_t rank) {
  operands.push_back(step);
  operands.insert(operands.end(), rank - 1, zero);
  return operands;
}

}  // namespace

std::string ProgramText::finish(const std::vector<Value>& outputs, const std::vector<std::pair<int, int>>& aliases,
                                int replicas, int steps, const std::vector<bool>& is_stacked) {
  write_used(outputs);
  std::vector<int> argument_of(outputs.size(), -1);  // [output that is an alias]
  for (const auto& [from, to] : aliases) argument_of[static_cast<std::size_t>(to)] = from;

  // The loop carries the step's number, the program's arguments, and the stacked outputs so far.
  ProgramText main;
  std::vector<Value> begin;
  for (std::size_t i = 0; i < arguments_.size(); ++i)
    begin.push_back(main.argument(is_stacked[i] ? stacked(arguments_[i].shape, steps) : arguments_[i].shape));
  const Shape index{DType::int64, {}};
  begin.insert(begin.begin(), main.integer(0, index));
  for (std::size_t j = 0; j < outputs.size(); ++j)
    if (argument_of[j] < 0) begin.push_back(main.constant(0, stacked(outputs[j].shape, steps)));

  std::vector<Shape> shapes, result_shapes;
  for (const auto& value : begin) shapes.push_back(value.shape);
  for (const auto& output : outputs) result_shapes.push_back(output.shape);
  const auto goes_on = region(shapes, [&](ProgramText& test, const std::vector<Value>& carried) {
    return std::vector<Value>{test.compare("LT", carried[0], test.integer(steps, index))};
  });
  const auto step = region(shapes, [&](ProgramText& body, const std::vector<Value>& carried) {
    const auto zero = body.integer(0, index);
    std::vector<Value> arguments;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const auto& all = carried[i + 1];
      if (!is_stacked[i]) {
        arguments.push_back(all);
        continue;
      }
      auto sizes = all.shape.sizes;
      sizes[0] = 1;
      const auto one = body.add("stablehlo.dynamic_slice", with_indices({all}, carried[0], zero, sizes.size()),
                                {all.shape.dtype, sizes}, "slice_sizes = " + array_of(sizes));
      arguments.push_back(body.reshape(one, arguments_[i].shape.sizes));
    }
    const auto results = body.add("func.call", arguments, result_shapes, "callee = @step");
    auto next = carried;
    next[0] = body.plus(carried[0], body.integer(1, index));
    auto at = arguments_.size() + 1;
    for (std::size_t j = 0; j < outputs.size(); ++j) {
      if (argument_of[j] >= 0) {
        next[static_cast<std::size_t>(argument_of[j]) + 1] = results[j];
        continue;
      }
      const auto& all = carried[at];
      const auto one = body.reshape(results[j], stacked(results[j].shape, 1).sizes);
      const auto places = with_indices({all, one}, carried[0], zero, all.shape.sizes.size());
      next[at++] = body.add("stablehlo.dynamic_update_slice", places, all.shape);
    }
    return next;
  });
  const auto ended = main.add("stablehlo.while", begin, shapes, "", text(goes_on, ", ", step));
  std::vector<Value> finals;
  auto at = arguments_.size() + 1;
  for (std::size_t j = 0; j < outputs.size(); ++j)
    finals.push_back(argument_of[j] >= 0 ? ended[static_cast<std::size_t>(argument_of[j]) + 1] : ended[at++]);
  return text("module @program attributes {mhlo.num_replicas = ", replicas, " : i32} {\n",
              main.function("public @main", finals, aliases), function("private @step", outputs, {}), "}\n");
}

}  // namespace lockstep::pjrt
