// Products of matrices.
#include "base/text.h"
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

// The product of arguments i and i + 1, over a dimension of each, for each index of the batch dimensions.
Value product(Call& call, std::size_t i, std::int64_t dimension, std::int64_t other, const Sizes& batch = {}) {
  call.require_equal_dtypes(i, i + 1);
  const auto a = call.value(i), b = call.value(i + 1);
  const auto of_a = a.shape.sizes[static_cast<std::size_t>(dimension)];
  const auto of_b = b.shape.sizes[static_cast<std::size_t>(other)];
  call.require(of_a == of_b, text("the sizes of its tensors differ: ", of_a, " and ", of_b));
  return call.program().dot(a, b, {dimension}, {other}, batch, batch);
}

void mm(Call& call) { call.returns({product(call, 0, 1, 0)}); }
void bmm(Call& call) { call.returns({product(call, 0, 2, 1, {0})}); }
void mv(Call& call) { call.returns({product(call, 0, 1, 0)}); }
void dot(Call& call) {
  for (const std::size_t i : {0U, 1U})
    call.require(call.tensor(i).dim() == 1, text("its tensors have ", call.tensor(i).dim(), " dimensions, and not 1"));
  call.returns({product(call, 0, 0, 0)});
}

// beta x + alpha product, x spread to the product's sizes.
void add_to(Call& call, const Value& product) {
  auto& program = call.program();
  const auto scaled = [&](const Value& value, std::size_t factor) {
    return call.real(factor) == 1 ? value
                                  : program.binary("stablehlo.multiply", value, call.number(factor, value.shape));
  };
  if (call.real(3) == 0) return call.returns({scaled(product, 4)});  // also where x is not a number
  const auto x = call.value(0);
  const auto summand_of_x = spread(call, scaled(x, 3), product.shape.sizes);
  call.returns({program.binary("stablehlo.add", summand_of_x, scaled(product, 4))});
}

void addmm(Call& call) { add_to(call, product(call, 1, 1, 0)); }
void baddbmm(Call& call) { add_to(call, product(call, 1, 2, 1, {0})); }

}  // namespace

void add_products(Lowerings& table) {
  table["aten::mm"] = mm;
  table["aten::bmm"] = bmm;
  table["aten::mv"] = mv;
  table["aten::dot"] = dot;
  table["aten::addmm"] = addmm;
  table["aten::baddbmm"] = baddbmm;
}

}  // namespace lockstep::tpu
