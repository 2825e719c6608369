// Pooling to given sizes, whose windows differ in size: by products with each element's share in each output.
#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

// Shares [outputs, size] of elements in outputs: output i is the mean of elements from floor(i size / outputs) to
// ceil((i + 1) size / outputs).
Value shares(Call& call, std::int64_t outputs, std::int64_t size, DType dtype) {
  std::vector<float> all(static_cast<std::size_t>(outputs * size));
  for (std::int64_t i = 0; i < outputs; ++i) {
    const auto begin = i * size / outputs, end = ((i + 1) * size + outputs - 1) / outputs;
    for (auto j = begin; j < end; ++j)
      all[static_cast<std::size_t>(i * size + j)] = 1 / static_cast<float>(end - begin);
  }
  return call.program().convert(call.program().array(all.data(), {DType::float32, {outputs, size}}), dtype);
}

// Rows and columns of x, its last two dimensions, by products: [..., rows, columns].
Value by_shares(Call& call, const Value& x, const Value& rows, const Value& columns, std::int64_t of_share) {
  auto& program = call.program();
  const auto rank = static_cast<std::int64_t>(x.shape.sizes.size());
  const auto over_rows = program.dot(x, rows, {rank - 2}, {of_share});  // [..., columns, outputs]
  return program.dot(over_rows, columns, {rank - 2}, {of_share});
}

void adaptive_pool(Call& call) {
  const auto x = call.value(0);
  const auto outputs = call.integers(1);
  const auto rank = x.shape.sizes.size();
  call.returns({by_shares(call, x, shares(call, outputs[0], x.shape.sizes[rank - 2], x.shape.dtype),
                          shares(call, outputs[1], x.shape.sizes[rank - 1], x.shape.dtype), 1)});
}

void adaptive_pool_backward(Call& call) {
  const auto gradient = call.value(0), x = call.value(1);
  const auto rank = x.shape.sizes.size();
  call.returns(
      {by_shares(call, gradient, shares(call, gradient.shape.sizes[rank - 2], x.shape.sizes[rank - 2], x.shape.dtype),
                 shares(call, gradient.shape.sizes[rank - 1], x.shape.sizes[rank - 1], x.shape.dtype), 0)});
}

}  // namespace

void add_adaptive_pooling(Lowerings& table) {
  table["aten::_adaptive_avg_pool2d"] = adaptive_pool;
  table["aten::_adaptive_avg_pool2d_backward"] = adaptive_pool_backward;
}

}  // namespace lockstep::tpu
