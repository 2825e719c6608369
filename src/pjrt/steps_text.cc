// A program of several steps: one function that is the step, and a loop that calls it.
#include "base/text.h"
#include "pjrt/stablehlo.h"

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

std::string returned(const std::vector<Value>& values) {
  return text("    \"stablehlo.return\"(", names_of(values), ") : (", types_of(values), ") -> ()\n");
}

std::string block(const std::vector<Value>& values) {
  std::vector<std::string> list;
  for (const auto& value : values) list.push_back(text(value.name, ": ", type_of(value.shape)));
  return text("  ^bb0(", join(list), "):\n");
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

  ProgramText test, body;
  body.next_ = test.next_ = main.next_;
  std::vector<Value> carried;
  for (std::size_t i = 0; i < begin.size(); ++i) carried.push_back({text("%carried", i), begin[i].shape});

  const auto goes_on = test.compare("LT", carried[0], test.integer(steps, index));

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
  std::vector<Shape> result_shapes;
  for (const auto& output : outputs) result_shapes.push_back(output.shape);
  const auto results = body.add("func.call", arguments, result_shapes, "callee = @step");
  auto next = carried;
  next[0] = body.binary("stablehlo.add", carried[0], body.integer(1, index));
  auto at = arguments_.size() + 1;
  for (std::size_t j = 0; j < outputs.size(); ++j) {
    if (argument_of[j] >= 0) {
      next[static_cast<std::size_t>(argument_of[j]) + 1] = results[j];
      continue;
    }
    const auto& all = carried[at];
    const auto rank = all.shape.sizes.size();
    const auto one = body.reshape(results[j], stacked(results[j].shape, 1).sizes);
    next[at++] =
        body.add("stablehlo.dynamic_update_slice", with_indices({all, one}, carried[0], zero, rank), all.shape);
  }

  std::vector<Shape> carried_shapes;
  for (const auto& value : carried) carried_shapes.push_back(value.shape);
  const auto ended = main.add("stablehlo.while", begin, carried_shapes, "",
                              text("({\n", block(carried), test.lines_, returned({goes_on}), "  }, {\n", block(carried),
                                   body.lines_, returned(next), "  }) "));
  std::vector<Value> finals;
  at = arguments_.size() + 1;
  for (std::size_t j = 0; j < outputs.size(); ++j)
    finals.push_back(argument_of[j] >= 0 ? ended[static_cast<std::size_t>(argument_of[j]) + 1] : ended[at++]);
  return text("module @program attributes {mhlo.num_replicas = ", replicas, " : i32} {\n",
              main.function("public @main", finals, aliases), function("private @step", outputs, {}), "}\n");
}

}  // namespace lockstep::pjrt
