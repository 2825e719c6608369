// Elements and rows that indices pick.
#include <ATen/ATen.h>

#include "base/text.h"
#include "tpu/call.h"
#include "tpu/pjrt/stablehlo.h"

namespace lockstep::tpu {
namespace {

// Rows of a table [rows, width] at indices [...]: [..., width].
void embedding(Call& call) {
  const auto table = call.value(0), indices = call.value(1);
  auto sizes = indices.shape.sizes;
  const auto batch = sizes.size();
  sizes.push_back(table.shape.sizes[1]);
  call.returns({call.program().add(
      "stablehlo.gather", {table, indices}, {table.shape.dtype, sizes},
      text("dimension_numbers = #stablehlo.gather<offset_dims = [", batch,
           "], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = ", batch,
           ">, slice_sizes = ", pjrt::array_of(Sizes{1, table.shape.sizes[1]}), ", indices_are_sorted = false"))});
}

// The sum of the gradients [..., width] of each row; row `padding` has none.
void embedding_backward(Call& call) {
  auto& program = call.program();
  if (call.flag(4)) call.refuse("scale_grad_by_freq is true");
  const auto gradient = call.value(0), indices = call.value(1);
  const auto rows = call.integer(2), padding = call.integer(3);
  const auto batch = indices.shape.sizes.size();
  const Shape table{gradient.shape.dtype, {rows, gradient.shape.sizes.back()}};
  const auto sums =
      program.add("stablehlo.scatter", {program.constant(0, table), indices, gradient}, table,
                  text("scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [", batch,
                       "], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = ", batch,
                       ">, indices_are_sorted = false, unique_indices = false"),
                  pjrt::reducer("stablehlo.add", table.dtype));
  if (padding < 0) return call.returns({sums});
  const Shape places{DType::int64, table.sizes};
  const auto is_padding =
      program.compare("EQ", program.iota(places, 0), program.constant(static_cast<double>(padding), places));
  call.returns({program.select(is_padding, program.constant(0, table), sums)});
}

// Where each element of `index`, which counts along `dimension`, lies: [..., rank].
Value places_of(Call& call, const Value& index, std::int64_t dimension) {
  auto& program = call.program();
  auto sizes = index.shape.sizes;
  sizes.push_back(1);
  std::vector<Value> along;
  for (const auto d : all_dimensions(index.shape.sizes.size()))
    along.push_back(program.reshape(d == dimension ? index : program.iota(index.shape, d), sizes));
  return program.concatenate(along, static_cast<std::int64_t>(index.shape.sizes.size()));
}

void gather(Call& call) {
  const auto x = call.value(0), index = call.value(2);
  const auto rank = x.shape.sizes.size();
  const auto all = all_dimensions(rank);
  const auto places = places_of(call, index, call.dimension(call.integer(1), rank));
  call.returns({call.program().add(
      "stablehlo.gather", {x, places}, {x.shape.dtype, index.shape.sizes},
      text("dimension_numbers = #stablehlo.gather<offset_dims = [], collapsed_slice_dims = ", pjrt::numbers_of(all),
           ", start_index_map = ", pjrt::numbers_of(all), ", index_vector_dim = ", rank,
           ">, slice_sizes = ", pjrt::array_of(Sizes(rank, 1)), ", indices_are_sorted = false"))});
}

// The reducer that replaces the old value.
std::string replacement(DType dtype) {
  const Shape scalar{dtype, {}};
  return pjrt::ProgramText::region(
      {scalar, scalar}, [](pjrt::ProgramText&, const std::vector<Value>& both) { return std::vector<Value>{both[1]}; });
}

// x with `values`, of the sizes of `index`, at its places.
Value scattered(Call& call, const Value& x, const Value& index, const Value& values, const std::string& region) {
  const auto rank = x.shape.sizes.size();
  const auto all = all_dimensions(rank);
  const auto places = places_of(call, index, call.dimension(call.integer(1), rank));
  return call.program().add(
      "stablehlo.scatter", {x, places, call.program().convert(values, x.shape.dtype)}, x.shape,
      text("scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [], inserted_window_dims = ",
           pjrt::numbers_of(all), ", scatter_dims_to_operand_dims = ", pjrt::numbers_of(all),
           ", index_vector_dim = ", rank, ">, indices_are_sorted = false, unique_indices = false"),
      region);
}

// The source may be larger than the index.
Value source_in(Call& call, std::size_t i, const Value& index) {
  const auto source = call.value(i);
  const Sizes begin(index.shape.sizes.size()), step(index.shape.sizes.size(), 1);
  return source.shape.sizes == index.shape.sizes ? source
                                                 : call.program().slice(source, begin, index.shape.sizes, step);
}

void scatter(Call& call) {
  const auto x = call.value(0), index = call.value(2);
  call.returns({scattered(call, x, index, source_in(call, 3, index), replacement(x.shape.dtype))});
}

void scatter_value(Call& call) {
  const auto x = call.value(0), index = call.value(2);
  const auto values = call.number(3, {x.shape.dtype, index.shape.sizes});
  call.returns({scattered(call, x, index, values, replacement(x.shape.dtype))});
}

void scatter_add(Call& call) {
  const auto x = call.value(0), index = call.value(2);
  const auto region = pjrt::reducer("stablehlo.add", x.shape.dtype);
  call.returns({scattered(call, x, index, source_in(call, 3, index), region)});
}

// Slices along a dimension, [index].
void index_select(Call& call) {
  const auto x = call.value(0), index = call.value(2);
  call.require(
      index.shape.sizes.size() <= 1 && (index.shape.dtype == DType::int64 || index.shape.dtype == DType::int32),
      text("its index has ", index.shape.sizes.size(), " dimensions, and the dtype ", name_of(index.shape.dtype),
           "; it must have at most one, of integers"));
  const auto rank = x.shape.sizes.size();
  const auto dimension = call.dimension(call.integer(1), rank);
  auto sizes = x.shape.sizes, slice = x.shape.sizes, offsets = all_dimensions(rank);
  sizes[static_cast<std::size_t>(dimension)] = index.shape.sizes.empty() ? 1 : index.shape.sizes[0];
  slice[static_cast<std::size_t>(dimension)] = 1;
  offsets.erase(offsets.begin() + dimension);
  const auto list = call.program().reshape(index, {sizes[static_cast<std::size_t>(dimension)]});
  call.returns({call.program().add(
      "stablehlo.gather", {x, list}, {x.shape.dtype, sizes},
      text("dimension_numbers = #stablehlo.gather<offset_dims = ", pjrt::numbers_of(offsets),
           ", collapsed_slice_dims = [", dimension, "], start_index_map = [", dimension,
           "], index_vector_dim = 1>, slice_sizes = ", pjrt::array_of(slice), ", indices_are_sorted = false"))});
}

// x, to whose slices along a dimension, [index], alpha times those of the source are added.
void index_add(Call& call) {
  auto& program = call.program();
  const auto x = call.value(0), index = call.value(2);
  auto source = program.convert(call.value(3), x.shape.dtype);
  if (call.real(4) != 1) source = program.times(source, call.number(4, source.shape));
  const auto dimension = call.dimension(call.integer(1), x.shape.sizes.size());
  auto others = all_dimensions(x.shape.sizes.size());
  others.erase(others.begin() + dimension);
  call.returns({program.add(
      "stablehlo.scatter", {x, program.reshape(index, {index.shape.elements()}), source}, x.shape,
      text("scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = ", pjrt::numbers_of(others),
           ", inserted_window_dims = [", dimension, "], scatter_dims_to_operand_dims = [", dimension,
           "], index_vector_dim = 1>, indices_are_sorted = false, unique_indices = false"),
      pjrt::reducer("stablehlo.add", x.shape.dtype))});
}

// For index and index_put: x with the indexed dimensions in front, as one, and the row to which each element of the
// broadcast indices points.
struct Indexed {
  at::Tensor rows;            // [product of the indexed sizes, product of the others]
  at::Tensor places;          // [elements of the indices]
  Sizes index_sizes, others;  // of the indices, and of x's dimensions that are not indexed
  Sizes order;                // of x's dimensions in `rows`
  std::int64_t front = 0;     // where the indices' dimensions are in the result
};

Indexed indexed(Call& call) {
  const auto x = call.tensor(0);
  std::vector<at::Tensor> indices;
  Sizes dimensions, rest;
  const auto list = call.argument(1).toListRef();
  for (std::size_t i = 0; i < static_cast<std::size_t>(x.dim()); ++i) {
    const bool given = i < list.size() && !list[i].isNone() && list[i].toTensor().defined();
    (given ? dimensions : rest).push_back(static_cast<std::int64_t>(i));
    if (!given) continue;
    const auto index = list[i].toTensor();
    if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)
      call.refuse("an index is a mask, so that the result's shape depends on values; use where or masked_fill");
    const auto size = x.size(static_cast<std::int64_t>(i));
    indices.push_back(at::where(index < 0, index + size, index));
  }
  indices = at::broadcast_tensors(indices);
  Indexed result;
  result.index_sizes = indices[0].sizes().vec();
  result.order = dimensions;
  result.order.insert(result.order.end(), rest.begin(), rest.end());
  std::int64_t count = 1;
  result.places = at::zeros_like(indices[0]);
  for (std::size_t i = 0; i < dimensions.size(); ++i) {
    result.places = result.places * x.size(dimensions[i]) + indices[i];
    count *= x.size(dimensions[i]);
  }
  result.places = result.places.reshape({-1});
  for (const auto i : rest) result.others.push_back(x.size(i));
  const bool adjacent = dimensions.back() - dimensions.front() + 1 == static_cast<std::int64_t>(dimensions.size());
  result.front = adjacent ? dimensions.front() : 0;
  result.rows = x.permute(result.order).reshape({count, -1});
  return result;
}

// The result's dimensions: those of the indices lie at `front`, between x's others.
at::Tensor in_place(const Indexed& all, const at::Tensor& rows) {
  Sizes sizes = all.index_sizes;
  sizes.insert(sizes.end(), all.others.begin(), all.others.end());
  const auto indices = static_cast<std::int64_t>(all.index_sizes.size());
  Sizes order;
  for (std::int64_t i = 0; i < all.front; ++i) order.push_back(indices + i);
  for (std::int64_t i = 0; i < indices; ++i) order.push_back(i);
  for (auto i = indices + all.front; i < static_cast<std::int64_t>(sizes.size()); ++i) order.push_back(i);
  return rows.reshape(sizes).permute(order);
}

void index(Call& call) {
  const auto all = indexed(call);
  call.returns(in_place(all, all.rows.index_select(0, all.places)));
}

void index_put(Call& call) {
  const auto x = call.tensor(0);
  const auto all = indexed(call);
  // The values as they would be read, then with the indices in front.
  const auto like = in_place(all, all.rows.index_select(0, all.places));
  const auto indices = static_cast<std::int64_t>(all.index_sizes.size());
  Sizes order;
  for (std::int64_t i = 0; i < indices; ++i) order.push_back(all.front + i);
  for (std::int64_t i = 0; i < like.dim(); ++i)
    if (i < all.front || i >= all.front + indices) order.push_back(i);
  const auto values = call.tensor(2).expand(like.sizes()).permute(order).reshape({all.places.numel(), -1});
  const auto places = all.places.unsqueeze(1).expand({all.places.numel(), all.rows.size(1)});
  const auto changed = call.flag(3) ? all.rows.index_add(0, all.places, values.to(all.rows.scalar_type()))
                                    : all.rows.scatter(0, places, values.to(all.rows.scalar_type()));
  Sizes sizes, back(all.order.size());
  for (std::size_t i = 0; i < all.order.size(); ++i) {
    sizes.push_back(x.size(all.order[i]));
    back[static_cast<std::size_t>(all.order[i])] = static_cast<std::int64_t>(i);
  }
  call.returns(changed.reshape(sizes).permute(back));
}

}  // namespace

void add_indexing(Lowerings& table) {
  table["aten::index.Tensor"] = index;
  table["aten::index_put"] = index_put;
  table["aten::embedding"] = embedding;
  table["aten::embedding_dense_backward"] = embedding_backward;
  table["aten::gather"] = gather;
  table["aten::scatter.src"] = scatter;
  table["aten::scatter.value"] = scatter_value;
  table["aten::scatter_add"] = scatter_add;
  table["aten::index_select"] = index_select;
  table["aten::index_add"] = index_add;
}

}  // namespace lockstep::tpu
