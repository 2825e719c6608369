// Elements and rows that indices pick.
#include "base/text.h"
#include "pjrt/stablehlo.h"
#include "tpu/call.h"

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

// Which replaces what was there.
std::string replacement(DType dtype) {
  const auto scalar = pjrt::type_of({dtype, {}});
  return text("({\n  ^bb0(%before: ", scalar, ", %after: ", scalar, "):\n    \"stablehlo.return\"(%after) : (", scalar,
              ") -> ()\n  }) ");
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
  if (call.real(4) != 1) source = program.binary("stablehlo.multiply", source, call.number(4, source.shape));
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

}  // namespace

void add_indexing(Lowerings& table) {
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
