#include "tpu/programs/compiled_model.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"

namespace lockstep::programs {

Shapes shapes_of(const Example& batch) {
  const auto none = internal::rows_of(batch, 0, 0);
  return ops::shapes_of({none.x, none.y, none.weight});
}

std::vector<Tensor> defined_of(const Example& example) {
  return ops::defined_of({example.x, example.y, example.weight});
}

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

// Returns "x Float [28, 28], y Long []", for one example.
std::string described(const Example& part) {
  std::string tensors;
  for (const auto& [name, tensor] :
       {std::pair("x", part.x), std::pair("y", part.y), std::pair("weight", part.weight)}) {
    if (tensor.defined())
      tensors += text(tensors.empty() ? "" : ", ", name, " ", tensor.scalar_type(), " ", tensor.sizes().slice(1));
  }
  return tensors;
}

// A worker's message to the others.
struct Told {
  std::int64_t rows = 0;
  std::string updates;  // [step]: 1 or 0
  std::string launch;   // what must be the same for all
};

std::string printed(const Told& told) { return text(told.rows, " ", told.updates, " ", told.launch); }

Told parsed(const std::string& printed) {
  Told told;
  std::istringstream words(printed);
  words >> told.rows >> told.updates >> std::ws;
  std::getline(words, told.launch);
  return told;
}

std::string bytes_of(const Example& row) {
  std::string bytes;
  for (const auto& tensor : defined_of(row)) {
    const auto values = tensor.cpu().contiguous();
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return bytes;
}

// Returns the example of these bytes, with the shapes of `none`, a part without examples.
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

LaunchAgreement agree_on_launch(const Communicator& workers, const std::string& name, const Inputs& inputs,
                                std::vector<bool> updates) {
  check_alike(inputs);
  LaunchAgreement all{.updates = std::move(updates)};
  for (const auto& input : inputs) {
    for (const auto& part : input) {
      if (all.rows == 0 && part.size() > 0) all.row = internal::rows_of(part, 0, 1);
      all.rows = std::max(all.rows, part.size());
    }
  }
  if (workers.size() == 1) {
    if (all.rows == 0) throw InvalidArgument("a batch has no examples");
    return all;
  }
  Told mine{all.rows, "", text(name, " for ", all.updates.size(), " batch(es) of ", described(inputs[0][0]))};
  for (const bool updated : all.updates) mine.updates += updated ? '1' : '0';
  std::vector<Told> told;
  for (const auto& theirs : workers.all_gather(printed(mine))) told.push_back(parsed(theirs));
  for (std::size_t worker = 0; worker < told.size(); ++worker) {
    if (told[worker].launch == told[0].launch) continue;
    throw InvalidArgument(text("the workers run one program together, and they would launch different ones: worker 0 ",
                               told[0].launch, "; worker ", worker, " ", told[worker].launch));
  }
  int with_example = -1;
  bool have_all_examples = true;
  for (std::size_t worker = 0; worker < told.size(); ++worker) {
    const auto& theirs = told[worker];
    all.rows = std::max(all.rows, theirs.rows);
    for (std::size_t step = 0; step < all.updates.size(); ++step)
      all.updates[step] = all.updates[step] || theirs.updates[step] == '1';
    if (theirs.rows > 0 && with_example < 0) with_example = static_cast<int>(worker);
    have_all_examples = have_all_examples && theirs.rows > 0;
  }
  if (with_example < 0) throw InvalidArgument("a batch has no examples");
  if (have_all_examples) return all;
  const auto bytes = workers.broadcast(workers.rank() == with_example ? bytes_of(all.row) : "", with_example);
  if (!all.row.x.defined()) all.row = row_of(bytes, inputs[0][0]);
  return all;
}

}  // namespace lockstep::programs
