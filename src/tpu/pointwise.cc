// Operators that compute each element from one element of each argument.
#include <ATen/core/Reduction.h>
#include <ATen/native/TypeProperties.h>

#include <cmath>

#include "base/text.h"
#include "ops/tensors.h"
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

using pjrt::is_floating;

// The dtype of functions such as exp: for integers, LibTorch's default dtype.
DType floating(DType dtype) { return is_floating(dtype) ? dtype : default_dtype(); }

Sizes common_sizes(const Call& call, const std::vector<Value>& values) {
  Sizes sizes;
  for (const auto& value : values) {
    const auto& other = value.shape.sizes;
    if (other.size() > sizes.size()) sizes.insert(sizes.begin(), other.size() - sizes.size(), 1);
    for (std::size_t i = 0; i < other.size(); ++i) {
      auto& size = sizes[sizes.size() - other.size() + i];
      if (size == 1) size = other[i];
      call.require(other[i] == 1 || other[i] == size,
                   text("its tensors have the sizes ", other[i], " and ", size, " in one dimension"));
    }
  }
  return sizes;
}

// Arguments `places`, tensors or numbers, with one dtype, that of LibTorch's rules of promotion, and common sizes.
std::vector<Value> promoted(Call& call, const std::vector<std::size_t>& places, bool to_floating = false) {
  at::native::ResultTypeState state;
  std::vector<Value> values;
  for (const auto place : places) {
    const auto& argument = call.argument(place);
    state = argument.isTensor() ? at::native::update_result_type_state(argument.toTensor(), state)
                                : at::native::update_result_type_state(argument.toScalar(), state);
  }
  auto dtype = ops::dtype_of(at::native::result_type(state));
  if (to_floating) dtype = floating(dtype);
  for (const auto place : places) {
    if (call.argument(place).isTensor()) {
      values.push_back(call.program().convert(call.value(place), dtype));
    } else {
      values.push_back(call.number(place, {dtype, {}}));
    }
  }
  const auto sizes = common_sizes(call, values);
  for (auto& value : values) value = spread(call, value, sizes);
  return values;
}

Lowering unary(const char* operation) {
  return [operation](Call& call) {
    const auto x = call.value(0);
    call.returns({call.program().unary(operation, call.program().convert(x, floating(x.shape.dtype)))});
  };
}

Lowering unary_of_any(const char* operation) {
  return [operation](Call& call) { call.returns({call.program().unary(operation, call.value(0))}); };
}

// Rounds x; integers are left as they are.
Lowering rounding(const char* operation) {
  return [operation](Call& call) {
    const auto x = call.value(0);
    call.returns({is_floating(x.shape.dtype) ? call.program().unary(operation, x) : x});
  };
}

void absolute(Call& call) {
  const auto x = call.value(0);
  call.returns({x.shape.dtype == DType::uint8 ? x : call.program().unary("stablehlo.abs", x)});
}

// The sign; that of NaN is 0.
void sign(Call& call) {
  const auto x = call.value(0);
  const auto signs = call.program().unary("stablehlo.sign", x);
  call.returns({call.program().select(call.program().compare("EQ", x, x), signs, call.program().constant(0, x.shape))});
}

Lowering binary(const char* operation, bool to_floating = false) {
  return [operation, to_floating](Call& call) {
    const auto x = promoted(call, {0, 1}, to_floating);
    call.returns({call.program().binary(operation, x[0], x[1])});
  };
}

Lowering of_bits(const char* operation) {
  return [operation](Call& call) {
    const auto x = promoted(call, {0, 1});
    call.require(!is_floating(x[0].shape.dtype),
                 text("its tensors have the dtype ", name_of(x[0].shape.dtype), "; they must be integers or Bool"));
    call.returns({call.program().binary(operation, x[0], x[1])});
  };
}

// a + alpha b, or a - alpha b; `reversed`: b - alpha a.
Lowering sum(const char* operation, bool reversed = false) {
  return [=](Call& call) {
    auto x = promoted(call, {0, 1});
    auto& program = call.program();
    if (reversed) std::swap(x[0], x[1]);
    if (call.real(2) != 1) x[1] = program.times(x[1], call.number(2, x[1].shape));
    call.returns({program.binary(operation, x[0], x[1])});
  };
}

Lowering comparison(const char* direction) {
  return [direction](Call& call) {
    const auto x = promoted(call, {0, 1});
    call.returns({call.program().compare(direction, x[0], x[1])});
  };
}

Value is_true(Call& call, const Value& x) {
  return x.shape.dtype == DType::boolean ? x : call.program().compare("NE", x, call.program().constant(0, x.shape));
}

void require_mask(const Call& call, std::size_t i) {
  const auto dtype = call.tensor(i).scalar_type();
  call.require(dtype == at::kBool || dtype == at::kByte, text("its mask has the dtype ", dtype, "; it must be Bool"));
}

void where(Call& call) {
  require_mask(call, 0);
  const auto x = promoted(call, {1, 2});
  const auto condition = is_true(call, call.value(0));
  const auto sizes = common_sizes(call, {condition, x[0]});
  call.returns(
      {call.program().select(spread(call, condition, sizes), spread(call, x[0], sizes), spread(call, x[1], sizes))});
}

void relu(Call& call) {
  const auto x = call.value(0);
  call.returns({call.program().binary("stablehlo.maximum", x, call.program().constant(0, x.shape))});
}

// 0 where x is at most the threshold, else the gradient.
void threshold_backward(Call& call) {
  const auto gradient = call.value(0), x = call.value(1);
  const auto below = call.program().compare("LE", x, call.number(2, x.shape));
  call.returns({call.program().select(below, call.program().constant(0, gradient.shape), gradient)});
}

constexpr double kTanhScale = 0.7978845608028654, kTanhCubic = 0.044715;  // sqrt(2 / pi)

// tanh(sqrt(2 / pi) (x + 0.044715 x^3)) of the approximation of GELU.
Value gelu_tanh(Call& call, const Value& x) {
  auto& program = call.program();
  const auto cubic = program.times(program.times(program.times(x, x), x), kTanhCubic);
  return program.unary("stablehlo.tanh", program.times(program.plus(x, cubic), kTanhScale));
}

// The normal distribution's cumulative one.
Value normal_cdf(Call& call, const Value& x) {
  auto& program = call.program();
  const auto erf = program.unary("chlo.erf", program.times(x, std::sqrt(0.5)));
  return program.times(program.plus(erf, 1), 0.5);
}

void gelu(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0);
  const auto cdf =
      call.word(1) == "tanh" ? program.times(program.plus(gelu_tanh(call, x), 1), 0.5) : normal_cdf(call, x);
  call.returns({program.times(x, cdf)});
}

void gelu_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), x = call.value(1);
  const auto square = program.times(x, x);
  Value derivative;
  if (call.word(2) == "tanh") {
    const auto tanh = gelu_tanh(call, x);
    const auto inner = program.times(program.plus(program.times(square, 3 * kTanhCubic), 1), kTanhScale);
    const auto slope = program.plus(program.times(program.times(tanh, tanh), -1), 1);  // of tanh
    const auto first = program.times(program.plus(tanh, 1), 0.5);
    derivative = program.plus(first, program.times(program.times(program.times(x, slope), inner), 0.5));
  } else {
    const auto density = program.times(program.unary("stablehlo.exponential", program.times(square, -0.5)),
                                       kTanhScale / 2);  // 1 / sqrt(2 pi)
    derivative = program.plus(normal_cdf(call, x), program.times(x, density));
  }
  call.returns({program.times(gradient, derivative)});
}

// 1 / (1 + exp(-x)) has the slope y (1 - y); tanh 1 - y^2.
void sigmoid_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), y = call.value(1);
  call.returns({program.times(gradient, program.times(y, program.plus(program.times(y, -1), 1)))});
}
void tanh_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), y = call.value(1);
  call.returns({program.times(gradient, program.plus(program.times(program.times(y, y), -1), 1))});
}

void silu(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0);
  call.returns({program.times(x, program.unary("stablehlo.logistic", x))});
}
void silu_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0), x = call.value(1);
  const auto y = program.unary("stablehlo.logistic", x);
  const auto slope = program.plus(program.times(x, program.plus(program.times(y, -1), 1)), 1);
  call.returns({program.times(gradient, program.times(y, slope))});
}

// Keeps x between the numbers in places 1 and 2, of which one may be None.
void clamp(Call& call) {
  std::vector<std::size_t> places{0};
  for (const std::size_t place : {1, 2})
    if (call.has(place)) places.push_back(place);
  const auto x = promoted(call, places);
  auto result = x[0];
  for (std::size_t i = 1; i < places.size(); ++i)
    result = call.program().binary(places[i] == 1 ? "stablehlo.maximum" : "stablehlo.minimum", result, x[i]);
  call.returns({result});
}

void reciprocal(Call& call) {
  const auto x = call.program().convert(call.value(0), floating(call.value(0).shape.dtype));
  call.returns({call.program().over(call.program().constant(1, x.shape), x)});
}

void logical_not(Call& call) { call.returns({call.program().unary("stablehlo.not", is_true(call, call.value(0)))}); }

Lowering logical(const char* operation) {
  return [operation](Call& call) {
    const auto a = is_true(call, call.value(0)), b = is_true(call, call.value(1));
    const auto sizes = common_sizes(call, {a, b});
    call.returns({call.program().binary(operation, spread(call, a, sizes), spread(call, b, sizes))});
  };
}

// a + value (b c), or a + value (b / c).
Lowering sum_of_two(const char* operation) {
  return [operation](Call& call) {
    auto& program = call.program();
    const auto x = promoted(call, {0, 1, 2});
    const auto both = program.binary(operation, x[1], x[2]);
    call.returns({program.plus(x[0], program.times(both, call.number(3, both.shape)))});
  };
}

// x, but the value where the mask says so.
void masked_fill(Call& call) {
  require_mask(call, 1);
  const auto x = call.value(0), mask = is_true(call, call.value(1));
  const auto sizes = common_sizes(call, {x, mask});
  const auto with = call.argument(2).isTensor() ? call.program().convert(call.value(2), x.shape.dtype)
                                                : call.number(2, {x.shape.dtype, {}});
  call.returns({call.program().select(spread(call, mask, sizes), spread(call, with, sizes), spread(call, x, sizes))});
}

// The loss of each element, from its difference, or their sum or mean.
void mse_loss(Call& call) {
  auto& program = call.program();
  const auto x = promoted(call, {0, 1});
  const auto difference = program.minus(x[0], x[1]);
  const auto losses = program.times(difference, difference);
  if (call.integer(2) == at::Reduction::None) return call.returns({losses});
  const auto sum = sum_over(call, losses, all_dimensions(losses.shape.sizes.size()));
  const auto count = static_cast<double>(losses.shape.elements());
  call.returns({call.integer(2) == at::Reduction::Mean ? program.times(sum, 1 / count) : sum});
}
void mse_loss_backward(Call& call) {
  auto& program = call.program();
  const auto x = promoted(call, {1, 2});
  const auto difference = program.minus(x[0], x[1]);
  const auto count = static_cast<double>(difference.shape.elements());
  const auto gradient = spread(call, call.value(0), difference.shape.sizes);
  const auto scale = call.integer(3) == at::Reduction::Mean ? 2 / count : 2;
  call.returns({program.times(program.times(gradient, difference), scale)});
}

// a + weight (b - a), computed from the nearer end as LibTorch does.
void lerp(Call& call) {
  auto& program = call.program();
  const auto x = promoted(call, {0, 1, 2});
  const auto difference = program.minus(x[1], x[0]);
  const auto from_a = program.plus(x[0], program.times(difference, x[2]));
  const auto rest = program.times(difference, program.plus(program.times(x[2], -1), 1));
  const auto from_b = program.minus(x[1], rest);
  const auto is_near_a = program.compare("LT", program.unary("stablehlo.abs", x[2]), program.constant(0.5, x[2].shape));
  call.returns({program.select(is_near_a, from_a, from_b)});
}

}  // namespace

void add_pointwise(Lowerings& table) {
  for (const auto& [name, operation] :
       std::map<const char*, const char*>{{"aten::exp", "stablehlo.exponential"},
                                          {"aten::expm1", "stablehlo.exponential_minus_one"},
                                          {"aten::log", "stablehlo.log"},
                                          {"aten::log1p", "stablehlo.log_plus_one"},
                                          {"aten::sqrt", "stablehlo.sqrt"},
                                          {"aten::rsqrt", "stablehlo.rsqrt"},
                                          {"aten::tanh", "stablehlo.tanh"},
                                          {"aten::sigmoid", "stablehlo.logistic"},
                                          {"aten::sin", "stablehlo.sine"},
                                          {"aten::cos", "stablehlo.cosine"},
                                          {"aten::erf", "chlo.erf"}})
    table[name] = unary(operation);
  table["aten::neg"] = unary_of_any("stablehlo.negate");
  table["aten::bitwise_not"] = unary_of_any("stablehlo.not");
  table["aten::abs"] = absolute;
  for (const char* const name : {"aten::sign", "aten::sgn"}) table[name] = sign;
  table["aten::floor"] = rounding("stablehlo.floor");
  table["aten::ceil"] = rounding("stablehlo.ceil");
  table["aten::round"] = rounding("stablehlo.round_nearest_even");
  for (const char* const overload : {".Tensor", ".Scalar"}) {
    table[std::string("aten::mul") + overload] = binary("stablehlo.multiply");
    table[std::string("aten::div") + overload] = binary("stablehlo.divide", /*to_floating=*/true);
    table[std::string("aten::add") + overload] = sum("stablehlo.add");
    table[std::string("aten::sub") + overload] = sum("stablehlo.subtract");
    table[std::string("aten::rsub") + overload] = sum("stablehlo.subtract", true);
    for (const auto& [name, direction] : std::map<const char*, const char*>{
             {"eq", "EQ"}, {"ne", "NE"}, {"lt", "LT"}, {"le", "LE"}, {"gt", "GT"}, {"ge", "GE"}})
      table[std::string("aten::") + name + overload] = comparison(direction);
  }
  for (const char* const overload : {".Tensor_Tensor", ".Tensor_Scalar", ".Scalar"})
    table[std::string("aten::pow") + overload] = binary("stablehlo.power");
  table["aten::maximum"] = binary("stablehlo.maximum");
  table["aten::minimum"] = binary("stablehlo.minimum");
  table["aten::atan2"] = binary("stablehlo.atan2", true);
  table["aten::bitwise_and.Tensor"] = of_bits("stablehlo.and");
  table["aten::bitwise_or.Tensor"] = of_bits("stablehlo.or");
  table["aten::logical_and"] = logical("stablehlo.and");
  table["aten::logical_or"] = logical("stablehlo.or");
  table["aten::logical_not"] = logical_not;
  table["aten::reciprocal"] = reciprocal;
  table["aten::where.self"] = where;
  table["aten::clamp"] = clamp;
  table["aten::relu"] = relu;
  table["aten::threshold_backward"] = threshold_backward;
  table["aten::gelu"] = gelu;
  table["aten::gelu_backward"] = gelu_backward;
  table["aten::silu"] = silu;
  table["aten::silu_backward"] = silu_backward;
  table["aten::sigmoid_backward"] = sigmoid_backward;
  table["aten::tanh_backward"] = tanh_backward;
  table["aten::addcmul"] = sum_of_two("stablehlo.multiply");
  table["aten::addcdiv"] = sum_of_two("stablehlo.divide");
  table["aten::masked_fill.Scalar"] = masked_fill;
  table["aten::masked_fill.Tensor"] = masked_fill;
  table["aten::mse_loss"] = mse_loss;
  table["aten::mse_loss_backward"] = mse_loss_backward;
  table["aten::lerp.Scalar"] = lerp;
  table["aten::lerp.Tensor"] = lerp;
}

}  // namespace lockstep::tpu
