#include "data/tables.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <array>
#include <cstring>

#include "base/text.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"

namespace lockstep::data {

namespace {

constexpr std::array kColumns{&Example::x, &Example::y, &Example::weight};
constexpr std::array kColumnNames{"x", "y", "weight"};

bool plain(const Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_contiguous(); }

std::vector<std::int64_t> with_leading(std::int64_t size, at::IntArrayRef sizes) {
  std::vector<std::int64_t> all{size};
  all.insert(all.end(), sizes.begin(), sizes.end());
  return all;
}

// Rows of a table by index, one memory copy each.
Tensor gather_column(const Tensor& table, std::span<const std::int64_t> indices) {
  if (!plain(table)) {
    return table.index_select(0, at::tensor(at::IntArrayRef(indices.data(), indices.size())).to(table.device()));
  }
  auto result =
      at::empty(with_leading(static_cast<std::int64_t>(indices.size()), table.sizes().slice(1)), table.options());
  const auto row_bytes = table.nbytes() / static_cast<std::size_t>(std::max<std::int64_t>(1, table.size(0)));
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  for (const auto index : indices) {
    std::memcpy(to, from + static_cast<std::size_t>(index) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return result;
}

Tensor stack_column(std::span<const Example> examples, std::size_t column) {
  std::vector<Tensor> tensors;
  for (const auto& example : examples) {
    const auto& tensor = example.*kColumns[column];
    const auto& first = examples[0].*kColumns[column];
    if (tensor.defined() != first.defined() || (first.defined() && tensor.sizes() != first.sizes())) {
      throw InvalidArgument(text("batch: ", kColumnNames[column], " of one example has shape ",
                                 tensor.defined() ? text(tensor.sizes()) : "(none)", ", of another ",
                                 first.defined() ? text(first.sizes()) : "(none)", "; a batch needs one shape"));
    }
    if (tensor.defined()) tensors.push_back(tensor);
  }
  return tensors.empty() ? Tensor() : at::stack(tensors);
}

}  // namespace

void TableBuilder::append(const Example& example) {
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    const auto& value = example.*kColumns[column];
    auto& table = table_.*kColumns[column];
    if (size_ == 0 && value.defined()) {
      table = at::empty(with_leading(std::max<std::int64_t>(capacity_, 1), value.sizes()), value.options());
    }
    if (!value.defined() && !table.defined()) continue;
    if (!value.defined() || !table.defined() || value.sizes() != table.sizes().slice(1) ||
        value.dtype() != table.dtype()) {
      throw InvalidArgument(text("cache: ", kColumnNames[column], " of element ", size_,
                                 " has another shape or dtype than the first element's; cache after batching, or pad"));
    }
    if (size_ == table.size(0)) {
      auto grown = at::empty(with_leading(2 * size_, value.sizes()), value.options());
      grown.narrow(0, 0, size_).copy_(table);
      table = grown;
    }
    if (plain(value) && plain(table)) {
      std::memcpy(static_cast<char*>(table.mutable_data_ptr()) + static_cast<std::size_t>(size_) * value.nbytes(),
                  value.const_data_ptr(), value.nbytes());
    } else {
      table.select(0, size_).copy_(value);
    }
  }
  ++size_;
}

Example TableBuilder::finish() const {
  return internal::each_of(table_, [this](const Tensor& column) { return column.narrow(0, 0, size_); });
}

Example gather_rows(const Example& table, std::span<const std::int64_t> indices) {
  return internal::each_of(table, [&](const Tensor& column) { return gather_column(column, indices); });
}

Row batch_of(std::span<const Row> rows) {
  const auto& table = rows[0].table;
  const bool one_table = table != nullptr && std::all_of(rows.begin(), rows.end(), [&](const Row& row) {
                           return row.table == table && !row.batch;
                         });
  Row batch;
  if (one_table) {
    batch.table = table;
    batch.batch.emplace();
    for (const auto& row : rows) batch.batch->push_back(row.index);
    return batch;
  }
  std::vector<Example> examples;
  for (const auto& row : rows) examples.push_back(row.materialize());
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    batch.value.*kColumns[column] = stack_column(examples, column);
  }
  return batch;
}

std::string table_file(const std::string& path) { return checkpoint_file(path); }

void write_table(const std::string& path, const Example& table) {
  Archive archive;
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    const auto& tensor = table.*kColumns[column];
    if (tensor.defined()) archive.tensors[kColumnNames[column]] = to_stored(tensor);
  }
  write_archive(path, archive);
}

Example read_table(const std::string& path) {
  const Archive archive = read_archive(path);
  Example table{from_stored(archive.tensor("x"))};
  for (std::size_t column = 1; column < kColumns.size(); ++column) {
    const char* const name = kColumnNames[column];
    if (archive.tensors.contains(name)) table.*kColumns[column] = from_stored(archive.tensor(name));
  }
  return table;
}

}  // namespace lockstep::data
