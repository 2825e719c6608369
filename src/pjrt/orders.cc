// Which order of dimensions values are computed in.
#include <numeric>

#include "pjrt/stablehlo.h"

namespace lockstep::pjrt {

ProgramText::Order ProgramText::order_of(const Value& x) const {
  const auto found = transposed_.find(x.name);
  if (found != transposed_.end()) return found->second;
  Dimensions same(x.shape.sizes.size());
  std::iota(same.begin(), same.end(), 0);
  return {x, same};
}

void ProgramText::write_transposed(const std::vector<Value>& values) {
  for (const auto& value : values) {
    if (not_written_.erase(value.name) == 0) continue;
    const auto& [source, permutation] = transposed_.at(value.name);
    lines_ += "  " + value.name + " = \"stablehlo.transpose\"(" + source.name +
              ") {permutation = " + array_of(permutation) + "} : (" + type_of(source.shape) + ") -> " +
              type_of(value.shape) + "\n";
  }
}

// x as what is transposed by `permutation` to give it, where that takes no transposition.
std::optional<Value> ProgramText::in_order(const Value& x, const Dimensions& permutation) {
  if (const auto found = transposed_.find(x.name); found != transposed_.end()) {
    if (found->second.permutation != permutation) return std::nullopt;
    return found->second.source;
  }
  const auto cheap = cheap_.find(x.name);
  if (cheap == cheap_.end()) return std::nullopt;
  const auto again = cheap->second;  // which adds to the map
  return again(*this, inverse(permutation));
}

Value ProgramText::elementwise(std::string_view operation, const std::vector<Value>& operands, DType dtype,
                               const std::string& attributes) {
  for (const auto& operand : operands) {
    const auto found = transposed_.find(operand.name);
    if (found == transposed_.end()) continue;
    const auto permutation = found->second.permutation;
    std::vector<Value> sources;
    for (const auto& other : operands) {
      const auto source = in_order(other, permutation);
      if (!source) break;
      sources.push_back(*source);
    }
    if (sources.size() < operands.size()) break;
    return transpose(add(operation, sources, {dtype, sources[0].shape.sizes}, attributes), permutation);
  }
  return add(operation, operands, {dtype, operands[0].shape.sizes}, attributes);
}

}  // namespace lockstep::pjrt
