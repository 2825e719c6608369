#include "train/launch_agreement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensor_lists.h"

namespace lockstep::train {
namespace {

using Inputs = std::vector<std::vector<Example>>;

void check_alike(const Inputs& inputs) {
  const auto like = shapes_of(inputs[0][0]);
  for (const auto& input : inputs) {
    for (const auto& part : input) {
      if (shapes_of(part) == like) continue;
      throw InvalidArgument(
          "batches of one launch (steps_per_execution), or parts of one batch, have examples of different shapes; "
          "they must be alike");
    }
  }
}

// "batches of this launch, with x Float [28, 28], y Long []": of one example.
std::string described(const Example& part) {
  std::string tensors;
  for (const auto& [name, tensor] :
       {std::pair("x", part.x), std::pair("y", part.y), std::pair("weight", part.weight)}) {
    if (tensor.defined())
      tensors += text(tensors.empty() ? "" : ", ", name, " ", tensor.scalar_type(), " ", tensor.sizes().slice(1));
  }
  return text("batches of this launch, with ", tensors);
}

// What a worker tells the others: its rows, for each step whether it updates, and its examples' shapes.
std::string tell(const LaunchAgreement& mine, const Inputs& inputs) {
  std::string updates;
  for (const bool updated : mine.updates) updates += updated ? '1' : '0';
  return text(mine.rows, " ", updates, " ", described(inputs[0][0]));
}

// Takes what a worker tells into account; returns its number of batches and its examples' shapes.
std::string add(const std::string& told, LaunchAgreement& all) {
  std::istringstream words(told);
  std::int64_t rows = 0;
  std::string updates, shapes;
  words >> rows >> updates;
  std::getline(words, shapes);
  all.rows = std::max(all.rows, rows);
  for (std::size_t step = 0; step < std::min(updates.size(), all.updates.size()); ++step)
    all.updates[step] = all.updates[step] || updates[step] == '1';
  return text(updates.size(), shapes);
}

std::string bytes_of(const Example& row) {
  std::string bytes;
  for (const auto& tensor : defined_of(row)) {
    const auto values = tensor.cpu().contiguous();
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return bytes;
}

// The example of these bytes, with the shapes of `none`, which has none.
Example row_of(const std::string& bytes, const Example& none) {
  std::size_t at = 0;
  const auto next = [&](const Tensor& like) {
    if (!like.defined()) return Tensor();
    auto sizes = like.sizes().vec();
    sizes[0] = 1;
    const auto tensor = at::empty(sizes, like.options());
    if (at + tensor.nbytes() > bytes.size()) throw Error("an example of another worker is too short");
    std::memcpy(tensor.mutable_data_ptr(), bytes.data() + at, tensor.nbytes());
    at += tensor.nbytes();
    return tensor;
  };
  Example row{next(none.x)};
  row.y = next(none.y);
  row.weight = next(none.weight);
  return row;
}

}  // namespace

Shapes shapes_of(const Example& batch) {
  const auto none = first_of(batch, 0);
  return ops::shapes_of({none.x, none.y, none.weight});
}

std::vector<Tensor> defined_of(const Example& example) {
  return ops::defined_of({example.x, example.y, example.weight});
}

Example first_of(const Example& example, std::int64_t count) {
  const auto some = [&](const Tensor& tensor) { return tensor.defined() ? tensor.narrow(0, 0, count) : tensor; };
  return {some(example.x), some(example.y), some(example.weight)};
}

LaunchAgreement agree_on_launch(const Communicator& workers, const Inputs& inputs, std::vector<bool> updates) {
  check_alike(inputs);
  LaunchAgreement all{.updates = std::move(updates)};
  for (const auto& input : inputs) {
    for (const auto& part : input) {
      if (all.rows == 0 && part.size() > 0) all.row = first_of(part, 1);
      all.rows = std::max(all.rows, part.size());
    }
  }
  if (workers.size() == 1) {
    if (all.rows == 0) throw InvalidArgument("a batch has no examples");
    return all;
  }
  const auto told = workers.all_gather(tell(all, inputs));
  const auto first = add(told[0], all);
  int with_example = -1;
  bool have_all_examples = true;
  for (int worker = 0; worker < workers.size(); ++worker) {
    const auto& theirs = told[static_cast<std::size_t>(worker)];
    if (const auto other = add(theirs, all); other != first) {
      throw InvalidArgument(text("the workers run one program together, and their batches differ: worker 0 has ", first,
                                 "; worker ", worker, " has ", other));
    }
    const bool has_example = !theirs.starts_with("0 ");
    if (has_example && with_example < 0) with_example = worker;
    have_all_examples = have_all_examples && has_example;
  }
  if (with_example < 0) throw InvalidArgument("a batch has no examples");
  if (have_all_examples) return all;
  const auto bytes = workers.broadcast(workers.rank() == with_example ? bytes_of(all.row) : "", with_example);
  if (!all.row.x.defined()) all.row = row_of(bytes, inputs[0][0]);
  return all;
}

}  // namespace lockstep::train
