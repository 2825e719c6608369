// The order of dimensions in which values are computed.
#include <algorithm>
#include <numeric>

#include "tpu/pjrt/stablehlo.h"

namespace lockstep::pjrt {

ProgramText::Order ProgramText::order_of(const Value& x) const {
  const auto found = transposed_.find(x.name);
  if (found != transposed_.end()) return found->second;
  Dimensions same(x.shape.sizes.size());
  std::iota(same.begin(), same.end(), 0);
  return {x, same};
}

void ProgramText::write_used(const std::vector<Value>& values) {
  for (const auto& value : values) {
    if (not_written_.erase(value.name) == 0) continue;
    if (const auto product = products_.find(value.name); product != products_.end()) {
      const auto& [a, b, contract_a, contract_b, attributes] = product->second;
      write(value.name, {value}, "stablehlo.dot_general", {a, b}, attributes, "");
    } else {
      const auto& [source, permutation] = transposed_.at(value.name);
      write(value.name, {value}, "stablehlo.transpose", {source}, "permutation = " + array_of(permutation), "");
    }
  }
}

// Returns x, a product that was not used yet, with the dimensions of its two factors in the other order: the product of
// the factors in the other order. Gradients of weights need this: LibTorch transposes what it multiplies.
std::optional<Value> ProgramText::transposed_product(const Value& x, const Dimensions& permutation) {
  const auto found = products_.find(x.name);
  if (found == products_.end() || !not_written_.contains(x.name)) return std::nullopt;
  const auto [a, b, contract_a, contract_b, attributes] = found->second;
  Dimensions swapped(x.shape.sizes.size());
  std::iota(swapped.begin(), swapped.end(), 0);
  std::rotate(swapped.begin(), swapped.begin() + static_cast<std::ptrdiff_t>(a.shape.sizes.size() - contract_a.size()),
              swapped.end());
  if (permutation != swapped) return std::nullopt;
  const auto made = dot(b, a, contract_b, contract_a);
  write_used({made});
  products_.erase(x.name);
  transposed_[x.name] = {made, inverse(permutation)};
  return made;
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
