// Random numbers: words of a counter-based generator, and the operators that make numbers of them.
#include <array>
#include <cmath>

#include "tpu/call.h"
#include "tpu/trace.h"

namespace lockstep::tpu {
namespace {

using Pair = std::array<Value, 2>;

// A number of 32 bits as the signed one of the same bits.
Value word(pjrt::ProgramText& program, std::uint32_t bits, const Shape& shape) {
  return program.integer(static_cast<std::int32_t>(bits), shape);
}

Value rotated(pjrt::ProgramText& program, const Value& x, std::uint32_t by) {
  const auto left = program.binary("stablehlo.shift_left", x, word(program, by, x.shape));
  const auto right = program.binary("stablehlo.shift_right_logical", x, word(program, 32 - by, x.shape));
  return program.binary("stablehlo.or", left, right);
}

Pair threefry(pjrt::ProgramText& program, const Pair& key, Pair x) {
  constexpr std::array<std::array<std::uint32_t, 4>, 2> kRotations{{{13, 15, 26, 6}, {17, 29, 16, 24}}};
  const auto& shape = x[0].shape;
  const auto parity = program.binary("stablehlo.xor", program.binary("stablehlo.xor", key[0], key[1]),
                                     word(program, 0x1BD11BDA, shape));
  const std::array<Value, 3> keys{key[0], key[1], parity};
  x = {program.plus(x[0], keys[0]), program.plus(x[1], keys[1])};
  for (std::uint32_t block = 0; block < 5; ++block) {
    for (const auto rotation : kRotations[block % 2]) {
      x[0] = program.plus(x[0], x[1]);
      x[1] = program.binary("stablehlo.xor", rotated(program, x[1], rotation), x[0]);
    }
    x[0] = program.plus(x[0], keys[(block + 1) % 3]);
    x[1] = program.plus(program.plus(x[1], keys[(block + 2) % 3]), word(program, block + 1, shape));
  }
  return x;
}

// Numbers from 0 to 1, without 1: multiples of 2^-24.
Value uniform(Call& call, const Sizes& sizes) {
  auto& program = call.program();
  const auto words = call.random_words(Shape{DType::int32, sizes}.elements());
  const auto bits = program.binary("stablehlo.shift_right_logical", words, word(program, 8, words.shape));
  const auto whole = program.convert(bits, DType::float32);
  const auto scaled = program.times(whole, 0x1p-24);
  return program.reshape(scaled, sizes);
}

Shape shape_of(Call& call, std::size_t like) { return call.value(like).shape; }

Value uniform_between(Call& call, const Shape& shape, double low, double high) {
  auto& program = call.program();
  const auto u = uniform(call, shape.sizes);
  const auto scaled = program.times(u, high - low);
  return program.convert(program.plus(scaled, program.constant(low, u.shape)), shape.dtype);
}

// By the inverse of the error function, of a number between -1 and 1: sqrt(2) erf^-1(u).
Value normal(Call& call, const Shape& shape, double mean, double deviation) {
  auto& program = call.program();
  const auto u = uniform_between(call, {DType::float32, shape.sizes}, std::nextafter(-1.0F, 0.0F), 1);
  const auto standard = program.unary("chlo.erf_inv", u);
  const auto scaled = program.times(standard, program.constant(std::sqrt(2.0) * deviation, u.shape));
  return program.convert(program.plus(scaled, program.constant(mean, u.shape)), shape.dtype);
}

// 1 where a uniform number is below `probability`.
Value chosen(Call& call, const Value& probability, const Shape& shape) {
  auto& program = call.program();
  return program.convert(program.compare("LT", uniform(call, shape.sizes), probability), shape.dtype);
}

Value fixed_probability(Call& call, double probability, const Sizes& sizes) {
  return call.program().constant(probability, {DType::float32, sizes});
}

// x, probability of staying is 1 - p: as LibTorch scales, by 1 / (1 - p).
void native_dropout(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0);
  const double p = call.real(1);
  const bool trains = !call.has(2) || call.flag(2);
  if (!trains) return call.returns({x, program.constant(1, {DType::boolean, x.shape.sizes})});
  const auto mask = chosen(call, fixed_probability(call, 1 - p, x.shape.sizes), {DType::boolean, x.shape.sizes});
  const auto scaled = program.times(x, p == 1 ? 0 : 1 / (1 - p));
  call.returns({program.select(mask, scaled, program.constant(0, x.shape)), mask});
}

void native_dropout_backward(Call& call) {
  auto& program = call.program();
  const auto gradient = call.value(0);
  const auto scaled = program.times(gradient, call.real(2));
  call.returns({program.select(call.value(1), scaled, program.constant(0, gradient.shape))});
}

void integers_between(Call& call, const Shape& shape, std::int64_t low, std::int64_t high) {
  if (high <= low || high - low > (std::int64_t{1} << 24)) call.refuse("its range has no integer, or more than 2^24");
  auto& program = call.program();
  const auto u = uniform(call, shape.sizes);
  const auto scaled = program.times(u, static_cast<double>(high - low));
  const auto whole = program.convert(program.unary("stablehlo.floor", scaled), DType::int64);
  const auto last = program.integer(high - low - 1, whole.shape);  // where the product was rounded up
  const auto kept = program.binary("stablehlo.minimum", whole, last);
  call.returns({program.convert(program.plus(kept, program.integer(low, whole.shape)), shape.dtype)});
}

}  // namespace

Value Trace::random_words(std::int64_t count) {
  if (!seed_argument_) {
    seed_argument_ = static_cast<int>(program_.arguments().size());
    program_.argument({DType::int32, {2}});
  }
  const Value seed = program_.arguments()[static_cast<std::size_t>(*seed_argument_)];
  const auto half = (count + 1) / 2;
  const Shape shape{DType::int32, {half}};
  Pair key;
  for (std::int64_t i = 0; i < 2; ++i) {
    const auto one = program_.slice(seed, {i}, {i + 1}, {1});
    key[static_cast<std::size_t>(i)] = program_.broadcast(program_.reshape(one, {}), shape.sizes, {});
  }
  const auto words = threefry(program_, key, {program_.iota(shape, 0), program_.integer(draws_++, shape)});
  return program_.slice(program_.concatenate({words[0], words[1]}, 0), {0}, {count}, {1});
}

void add_random(Lowerings& table) {
  table["aten::native_dropout"] = native_dropout;
  table["aten::native_dropout_backward"] = native_dropout_backward;
  table["aten::bernoulli"] = [](Call& call) {
    const auto x = call.value(0);
    call.returns({chosen(call, call.program().convert(x, DType::float32), x.shape)});
  };
  table["aten::bernoulli.p"] = [](Call& call) {
    const auto shape = shape_of(call, 0);
    call.returns({chosen(call, fixed_probability(call, call.real(1), shape.sizes), shape)});
  };
  table["aten::bernoulli.Tensor"] = [](Call& call) {
    const auto shape = shape_of(call, 0);
    const auto probability = call.program().convert(call.value(1), DType::float32);
    call.returns({chosen(call, spread(call, probability, shape.sizes), shape)});
  };
  table["aten::uniform"] = [](Call& call) {
    call.returns({uniform_between(call, shape_of(call, 0), call.real(1), call.real(2))});
  };
  table["aten::normal_functional"] = [](Call& call) {
    call.returns({normal(call, shape_of(call, 0), call.real(1), call.real(2))});
  };
  table["aten::random.from"] = [](Call& call) {
    if (!call.has(2)) call.refuse("it has no upper bound");
    integers_between(call, shape_of(call, 0), call.integer(1), call.integer(2));
  };
  table["aten::random.to"] = [](Call& call) { integers_between(call, shape_of(call, 0), 0, call.integer(1)); };
}

}  // namespace lockstep::tpu
