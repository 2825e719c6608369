// Every lowering against LibTorch's own operator: values and gradients, on random shapes and dtypes. Those of layers
// are in layers_test.cc.
#include "tpu/lowerings_testing.h"

namespace lockstep::tpu {
namespace {

// Golden: a lowering that is new has a comparison in one of the tests, or the numbers do not hold. After all tests.
class AllWereCompared final : public testing::Environment {
  void TearDown() override {
    const auto& tests = *testing::UnitTest::GetInstance();
    if (tests.test_to_run_count() < tests.total_test_count()) return;
    const std::set<std::string> refused{
        "aten::_local_scalar_dense", "aten::equal",    "aten::is_nonzero", "aten::nonzero",
        "aten::masked_select",       "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
    int count = 0;
    std::string others;
    for (const auto& [name, lowering] : lowerings()) {
      if (refused.contains(name)) continue;
      const auto dot = name.find('.');
      const auto copies = name.substr(0, dot) + "_copy" + (dot == std::string::npos ? "" : name.substr(dot));
      if (compared.contains(name) || compared.contains(copies))  // a view has two names
        ++count;
      else
        others += " " + name;
    }
    EXPECT_EQ(count, 251);
    // LibTorch calls these only inside some of its operators: views that change nothing, and memory that is filled
    // later.
    EXPECT_EQ(others,
              " aten::_reshape_alias aten::_reshape_alias_copy aten::alias aten::alias_copy aten::empty_strided "
              "aten::lift_fresh aten::lift_fresh_copy aten::new_empty");
  }
};
const auto* const all_were_compared = testing::AddGlobalTestEnvironment(new AllWereCompared);

TEST_F(EachLowering, PointwiseOfOne) {
  of_one({[](const auto& x) { return x.exp(); },
          [](const auto& x) { return x.expm1(); },
          [](const auto& x) { return x.tanh(); },
          [](const auto& x) { return x.sigmoid(); },
          [](const auto& x) { return x.sin(); },
          [](const auto& x) { return x.cos(); },
          [](const auto& x) { return x.erf(); },
          [](const auto& x) { return -x; },
          [](const auto& x) { return x.abs(); },
          [](const auto& x) { return x.sign() + x.sgn(); },
          [](const auto& x) { return x.relu(); },
          [](const auto& x) { return x.floor() + x.ceil() * 2 + x.round() * 4 + x.trunc() * 8; },
          [](const auto& x) { return at::silu(x); },
          [](const auto& x) { return at::gelu(x); },
          [](const auto& x) { return at::gelu(x, "tanh"); },
          [](const auto& x) { return at::softplus(x, 2, 1); },
          [](const auto& x) { return at::log_sigmoid(x); },
          [](const auto& x) { return at::leaky_relu(x, 0.1); },
          [](const auto& x) { return at::elu(x, 1.5, 1.1, 0.9); },
          [](const auto& x) { return at::hardtanh(x, -0.4, 0.6); },
          [](const auto& x) { return at::hardsigmoid(x * 4); },
          [](const auto& x) { return at::hardswish(x * 4); },
          [](const auto& x) { return at::mish(x); },
          [](const auto& x) { return x.clamp(-0.5, 0.7); },
          [](const auto& x) { return x.clamp_min(-0.2) + x.clamp_max(0.3); },
          [](const auto& x) { return x.pow(2) + x.square() + 2 - x + x * 3 + x / 2 - 1; },
          [](const auto& x) { return at::pow(2, x); },
          [](const auto& x) { return at::rsub(x, 3, 2); },
          [](const auto& x) { return x.logical_not().to(x.scalar_type()) + x.isposinf().to(x.scalar_type()); },
          [](const auto& x) { return (x / 0).isneginf().to(x.scalar_type()); },
          [](const auto& x) { return x.masked_fill(x > 0, 7) * x + x.clone().detach(); },
          [](const auto& x) {
            return x.eq(0.5) + x.ne(0.5) * 2 + x.lt(0.5) * 4 + x.le(0.5) * 8 + x.gt(0.5) * 16 + x.ge(0.5) * 32;
          }});
  of_one({[](const auto& x) { return x.log(); }, [](const auto& x) { return x.log1p(); },
          [](const auto& x) { return x.sqrt(); }, [](const auto& x) { return x.rsqrt(); },
          [](const auto& x) { return x.reciprocal(); }},
         true);
  for (const auto dtype : {at::kInt, at::kLong, at::kChar, at::kByte, at::kShort})
    same([](const Tensors& x) { return x[0].abs() * 2 + x[0].bitwise_not() - x[0].clamp_max(3); },
         {at::randint(100, shape(), dtype)});
}

TEST_F(EachLowering, PointwiseOfTwo) {
  of_two(
      {[](const auto& a, const auto& b) { return a + b; },
       [](const auto& a, const auto& b) { return at::sub(a, b, 3); },
       [](const auto& a, const auto& b) { return a * b; }, [](const auto& a, const auto& b) { return a / b; },
       [](const auto& a, const auto& b) { return at::maximum(a, b) + at::minimum(a, b) * 2; },
       [](const auto& a, const auto& b) { return at::atan2(a, b); },
       [](const auto& a, const auto& b) { return at::pow(a, b); },
       [](const auto& a, const auto& b) { return at::where(a > b, a, b * 2); },
       [](const auto& a, const auto& b) { return a.logical_and(b).to(at::kFloat) + a.logical_or(b - b); },
       [](const auto& a, const auto& b) {
         return a.eq(b) + a.ne(b) * 2 + a.lt(b) * 4 + a.le(b) * 8 + a.gt(b) * 16 + a.ge(b) * 32;
       },
       [](const auto& a, const auto& b) { return at::remainder(a * 4 - 4, b); },
       [](const auto& a, const auto& b) { return at::fmod(a * 4 - 4, b) + at::fmod(a, 0.3) + at::remainder(a, 0.3); },
       [](const auto& a, const auto& b) {
         return at::floor_divide(a * 4 - 4, b).detach() + at::floor_divide(a, 0.3).detach();
       },
       [](const auto& a, const auto& b) {
         return at::div(a * 4 - 4, b, "trunc") + at::div(a, b, "floor") + at::div(a, 0.3, "trunc");
       },
       [](const auto& a, const auto& b) { return at::lerp(a, a * 2, b) + at::lerp(a, a * 3, 0.3); },
       [](const auto& a, const auto& b) { return at::clamp(a, b * 0.9, b * 1.1) + a.clamp_min(b) + a.clamp_max(b); },
       [](const auto& a, const auto& b) { return at::addcmul(a, a, b, 0.5) + at::addcdiv(a, a, b, 0.5); },
       [](const auto& a, const auto& b) { return at::rsub(a, b, 2); }});
  const auto sizes = shape(1);
  const auto a = at::randint(-9, 9, sizes), b = at::randint(1, 5, sizes);
  same(
      [](const Tensors& x) {
        return at::div(x[0], x[1], "trunc") * 100 + at::div(x[0], x[1], "floor") * 10 + at::remainder(x[0], x[1]);
      },
      {a, b});
  same([](const Tensors& x) { return x[0].bitwise_and(x[1]) + x[0].bitwise_or(x[1]) * 2; }, {a, b});
  same([](const Tensors& x) { return x[0] + x[1]; }, {numbers({3}), at::arange(3)});
  same([](const Tensors& x) { return x[0] / x[1]; }, {at::arange(3), at::arange(3) + 1});
  same([](const Tensors& x) { return x[0].masked_fill(x[0] > 0, x[1]); }, {numbers({3, 2}), numbers({})});
}

TEST_F(EachLowering, EdgesOfArithmetic) {
  same([](const Tensors& x) { return at::linspace(0, 10, 5, x[0].options().dtype(at::kLong)) + x[0]; },
       {at::zeros({5}, at::kLong)});
  const auto whole = at::arange(-5, 6);
  same([](const Tensors& x) { return at::div(x[0], 0.5, "floor") + at::remainder(x[0], 0.7) + x[0].clamp_min(0.5); },
       {whole});
  same([](const Tensors& x) { return at::floor_divide(x[0], x[1]).detach(); },
       {at::ones({3}), at::tensor({0.1, 0.2, 0.3}).to(at::kFloat)});
  same([](const Tensors& x) { return x[0].gt(0).any() + x[0].gt(0).all() * 2; }, {at::zeros({0, 3})});
  same([](const Tensors& x) { return at::layer_norm(x[0], {4}, {}, x[1]); }, {numbers({2, 3, 4}), numbers({4})}, 1e-4);
}

TEST_F(EachLowering, Reductions) {
  for (int round = 0; round < 3; ++round) {
    const auto sizes = shape(1);
    const auto i = dimension(sizes);
    const bool keeps = round == 1;
    for (const auto& function : std::vector<One>{
             [&](const auto& x) { return x.sum() + x.mean() * x.prod(); },
             [&](const auto& x) { return x.sum(Sizes{i}, keeps) + x.mean(Sizes{i}, keeps) * 2; },
             [&](const auto& x) { return x.prod(i, keeps); },
             [&](const auto& x) { return x.amax(Sizes{i}, keeps) + x.amin(Sizes{i}, keeps) * 2; },
             [&](const auto& x) { return std::get<0>(x.max(i, keeps)) - std::get<0>(x.min(i, keeps)); },
             [&](const auto& x) { return std::get<1>(x.max(i, keeps)) + std::get<1>(x.min(i, keeps)) * 10; },
             [&](const auto& x) { return x.argmax(i, keeps) + x.argmin(i, keeps) * 10; },
             [&](const auto& x) { return x.argmax() + x.argmin(); },
             [&](const auto& x) { return x.softmax(i) + x.log_softmax(i); },
             [&](const auto& x) {
               return x.var(Sizes{i}, std::optional<at::Scalar>(0), keeps) +
                      x.std(Sizes{i}, std::optional<at::Scalar>(0.5), keeps);
             },
             [&](const auto& x) {
               return std::get<0>(at::var_mean(x, Sizes{i}, std::optional<at::Scalar>(0), keeps)) +
                      std::get<1>(at::var_mean(x, Sizes{i}, std::optional<at::Scalar>(0), keeps));
             },
             [&](const auto& x) {
               return at::linalg_vector_norm(x, 2, Sizes{i}, keeps) + at::linalg_vector_norm(x, 1) +
                      at::linalg_vector_norm(x, 3);
             },
             [&](const auto& x) {
               return at::linalg_vector_norm(x, std::numeric_limits<double>::infinity(), Sizes{i}, keeps);
             },
             [&](const auto& x) { return x.gt(0).any(i, keeps) + x.gt(0).all(i, keeps) * 2; },
             [&](const auto& x) { return x.gt(0).any() + x.gt(0).all() * 2; },
             [&](const auto& x) { return x.gt(0).any(Sizes{i}, keeps) + x.gt(0).all(Sizes{i}, keeps) * 2; },
             [&](const auto& x) { return x.cumsum(i) + x.cumprod(i).detach(); }})
      same([&](const Tensors& x) { return function(x[0]); }, {numbers(sizes)}, 1e-4);
    same([&](const Tensors& x) { return x[0].sum() + x[0].sum(i) + x[0].cumsum(i).sum() + x[0].prod(); },
         {at::randint(9, sizes)});
  }
  same(
      [](const Tensors& x) {
        return at::_safe_softmax(x[0].masked_fill(x[1].gt(1), -std::numeric_limits<double>::infinity()), 1);
      },
      {numbers({3, 4}), at::full({3, 4}, 2) * at::tensor({0, 1, 0}).view({3, 1})});
}

TEST_F(EachLowering, Order) {
  for (int round = 0; round < 3; ++round) {
    const auto sizes = shape(1);
    const auto i = dimension(sizes);
    const bool descending = round == 1;
    const auto x = round == 2 ? numbers(sizes).round() : numbers(sizes);
    same([&](const Tensors& all) { return std::get<0>(all[0].sort(i, descending)); }, {x});
    same([&](const Tensors& all) { return std::get<1>(all[0].sort(true, i, descending)); }, {x});
    const auto k = std::min<std::int64_t>(2, x.size(i));
    same([&](const Tensors& all) { return std::get<0>(all[0].topk(k, i, !descending)); }, {numbers(sizes)});
    same([&](const Tensors& all) { return all[0].flip({0}) + all[0].tril().sum(); }, {numbers({3, 4})});
  }
  auto with_nan = numbers({6});
  with_nan[2] = std::nan("");
  for (const bool descending : {false, true})
    same([&](const Tensors& x) { return std::get<1>(x[0].sort(true, 0, descending)); }, {with_nan});
  same([](const Tensors& x) { return x[0].triu(1) + x[0].tril(-1); }, {numbers({2, 4, 4})});
}

// LibTorch makes rot90 of other operators, and of views in place.
TEST_F(EachLowering, QuarterTurns) {
  for (std::int64_t k = -1; k <= 4; ++k) {
    same([&](const Tensors& x) { return x[0].rot90(k, {0, 1}) * 2; }, {numbers({3, 3})});
    same([&](const Tensors& x) { return x[0].rot90(k, {2, 0}); }, {numbers({2, 3, 4})});
  }
}

TEST_F(EachLowering, Shapes) {
  for (const auto& function : std::vector<One>{
           [](const auto& x) {
             return x.view({2, -1});
           },
           [](const auto& x) { return x.transpose(0, 2) * 2; },
           [](const auto& x) {
             return x.permute({2, 0, 1}).reshape({5, -1});
           },
           [](const auto& x) { return x.select(1, -1); },
           [](const auto& x) { return x.slice(2, 1, 5, 2); },
           [](const auto& x) {
             return x.unsqueeze(-1).expand({-1, -1, -1, 3}).squeeze(0);
           },
           [](const auto& x) {
             return x.slice(0, 0, 1).squeeze(0).squeeze() + x.slice(1, 0, 1).squeeze(Sizes{1}).sum();
           },
           [](const auto& x) {
             return at::cat({x, x * 2}, 1);
           },
           [](const auto& x) {
             return at::stack({x, x}, 1);
           },
           [](const auto& x) { return x.chunk(2, 1)[1] * x.split(2, 1)[0]; },
           [](const auto& x) {
             return x + at::ones({5}, x.options()) + at::full_like(x, 3) + at::zeros({5}, x.options()) +
                    at::full({5}, 2, x.options());
           },
           [](const auto& x) {
             return at::constant_pad_nd(x, {1, 2, 0, 1}, 3);
           },
           [](const auto& x) {
             return x + at::arange(5, x.options()) + at::linspace(0, 2, 5, x.options()) + at::zeros_like(x) +
                    at::ones_like(x);
           },
           [](const auto& x) { return x.matmul(at::eye(5, x.options())) + at::eye(4, 5, x.options()); },
           [](const auto& x) {
             return x.new_zeros({5}) + x.new_ones({5}) + x.new_full({5}, 2) + x + at::scalar_tensor(3, x.options());
           },
           [](const auto& x) {
             return x.repeat({1, 2, 1}) + x.flatten(1).sum();
           },
           [](const auto& x) { return x.unfold(1, 2, 1) * 2; },
           [](const auto& x) { return x[0].t().reshape({-1}); },
           [](const auto& x) {
             auto y = x * 1;
             y.select(0, 1).mul_(2);
             y.slice(1, 0, 4, 3).add_(1);
             y.narrow(2, 1, 2).zero_();
             y[0].fill_(3);
             return y * x;
           },
           [](const auto& x) {
             auto y = at::empty_like(x);
             y.copy_(x.to(at::kDouble));
             return y + x.to(at::kInt);
           },
           [](const auto& x) {
             return at::select_scatter(x, x[0] * 2, 0, 1) + at::slice_scatter(x, x.slice(1, 0, 2), 1, 2, 4);
           }})
    same([&](const Tensors& x) { return function(x[0]); }, {numbers({2, 4, 5})});
}

TEST_F(EachLowering, Indexing) {
  const auto index = at::randint(3, {2, 4});
  same([](const Tensors& x) { return x[0].gather(1, x[1]); }, {numbers({2, 3}), index});
  same([](const Tensors& x) { return x[0].scatter_add(0, x[1], x[2]); }, {numbers({3, 5}), index, numbers({2, 4})});
  same([](const Tensors& x) { return x[0].scatter(1, x[1], x[2]) + x[0].scatter(1, x[1], 5); },
       {numbers({2, 3}), at::tensor({2, 0, 1, 1, 2, 0}).view({2, 3}), numbers({2, 3})});
  same([](const Tensors& x) { return x[0].index_select(1, x[1]); }, {numbers({2, 3, 4}), at::randint(3, {5})});
  same([](const Tensors& x) { return x[0].index_add(1, x[1], x[2], 2); },
       {numbers({2, 3, 4}), at::randint(3, {5}), numbers({2, 5, 4})});
  same([](const Tensors& x) { return at::embedding(x[0], x[1]); }, {numbers({7, 4}), at::randint(7, {2, 3})});
  same([](const Tensors& x) { return at::embedding(x[0], x[1], 2); }, {numbers({3, 4}), at::randint(3, {9})});
  same([](const Tensors& x) { return at::index(x[0], indices({x[1]})); },
       {numbers({5, 3}), at::randint(-5, 5, {2, 4})});
  same(
      [](const Tensors& x) {
        return at::index(x[0], indices({{}, x[1]}));
      },
      {numbers({2, 5, 3}), at::randint(5, {4})});
  same(
      [](const Tensors& x) {
        return at::index(x[0], indices({x[1], {}, x[1]}));
      },
      {numbers({5, 2, 5}), at::randint(5, {4})});
  same(
      [](const Tensors& x) {
        return at::index(x[0], indices({x[1], x[2]}));
      },
      {numbers({4, 5, 3}), at::randint(4, {2, 1}), at::randint(5, {3})});
  same([](const Tensors& x) { return at::index_put(x[0], indices({x[1]}), x[2]) * x[0]; },
       {numbers({5, 3}), at::tensor({4, 0}), numbers({2, 3})});
  same(
      [](const Tensors& x) {
        return at::index_put(x[0], indices({{}, x[1]}), x[2], true);
      },
      {numbers({2, 5, 3}), at::tensor({4, 0, 4}), numbers({2, 3, 3})});
}

}  // namespace
}  // namespace lockstep::tpu
