// Products of matrices.
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

void mm(Call& call) { call.returns({call.program().dot(call.value(0), call.value(1), {1}, {0})}); }
void bmm(Call& call) { call.returns({call.program().dot(call.value(0), call.value(1), {2}, {1}, {0}, {0})}); }
void mv(Call& call) { call.returns({call.program().dot(call.value(0), call.value(1), {1}, {0})}); }
void dot(Call& call) { call.returns({call.program().dot(call.value(0), call.value(1), {0}, {0})}); }

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

void addmm(Call& call) { add_to(call, call.program().dot(call.value(1), call.value(2), {1}, {0})); }
void baddbmm(Call& call) { add_to(call, call.program().dot(call.value(1), call.value(2), {2}, {1}, {0}, {0})); }

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
