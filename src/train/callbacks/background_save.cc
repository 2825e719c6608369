#include "train/callbacks/background_save.h"

#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/text.h"
#include "checkpoint/state.h"
#include "cluster/store_texts.h"
#include "gradient/moving_state.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"
#include "strategy/replicated_state.h"

namespace lockstep::train {

namespace {

using checkpoint::ByteRange;
using gradient::Shard;

// A parameter's values, or one state of the optimizer for it.
struct LargeTensor {
  std::string name;
  std::size_t slot = 0;
  int state = -1;  // -1: the values
  checkpoint::TensorInfo info;
};

// Lists what is trained in the file's order: elements of 8 bytes before those of 4, so that none lies on two pages.
std::vector<LargeTensor> large_tensors(const ModelImpl& impl, bool weights_only) {
  std::vector<LargeTensor> all;
  const auto& slots = impl.parameters->slots();
  const auto states = weights_only ? std::vector<StateSpec>() : impl.gradients->updater().optimizer().rule().states();
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    for (int state = -1; state < static_cast<int>(states.size()); ++state) {
      for (std::size_t slot = 0; slot < slots.size(); ++slot) {
        if (!slots[slot].trainable || slots[slot].dtype != dtype) continue;
        auto name = slots[slot].name;
        if (state >= 0) {
          name =
              text(ModelState::kOptimizer, "/", strategy::name_of_state(states[static_cast<std::size_t>(state)], name));
        }
        all.push_back({name, slot, state, {ops::dtype_of(dtype), slots[slot].sizes}});
      }
    }
  }
  return all;
}

checkpoint::NamedTensors names_of(const std::vector<LargeTensor>& tensors) {
  checkpoint::NamedTensors named;
  for (const auto& tensor : tensors) named.emplace_back(tensor.name, tensor.info);
  return named;
}

// Returns the elements of the values (-1), or of a state, that lie in the range.
std::vector<Shard> elements_in(const ByteRange& range, int state, const std::vector<LargeTensor>& tensors) {
  std::vector<Shard> elements;
  std::size_t at = 0;
  for (const auto& tensor : tensors) {
    const auto size = size_of(tensor.info.dtype), bytes = tensor.info.bytes();
    const auto begin = std::clamp(range.begin, at, at + bytes) - at, end = std::clamp(range.end, at, at + bytes) - at;
    at += bytes;
    if (tensor.state != state || begin == end) continue;
    elements.push_back(
        {tensor.slot, static_cast<std::int64_t>(begin / size), static_cast<std::int64_t>((end - begin) / size)});
  }
  return elements;
}

at::Tensor copy_of_values(const ReplicatedParameters& parameters, const Shard& part) {
  const auto& slot = parameters.slots()[part.slot];
  const auto values = parameters.flat(0, slot.dtype).narrow(0, slot.offset + part.begin, part.count);
  return values.is_cpu() ? values.clone() : values.cpu();
}

// Copies this worker's part of the file, in the file's order. `ranges[rank]`: the bytes that each worker writes.
std::vector<at::Tensor> copy_part(const ModelImpl& impl, const std::vector<LargeTensor>& tensors,
                                  const std::vector<ByteRange>& ranges) {
  const auto mine = ranges[static_cast<std::size_t>(impl.topology.all.rank())];
  int states = 0;
  for (const auto& tensor : tensors) states = std::max(states, tensor.state + 1);
  std::vector<std::vector<at::Tensor>> copies;  // [1 + state], of its elements in the order of the file
  auto& values = copies.emplace_back();
  for (const auto& part : elements_in(mine, -1, tensors)) values.push_back(copy_of_values(*impl.parameters, part));
  for (int state = 0; state < states; ++state) {
    std::vector<std::vector<Shard>> needed;
    for (const auto& range : ranges) needed.push_back(elements_in(range, state, tensors));
    copies.push_back(gradient::copies_of_state(impl.topology.all, impl.gradients->updater(),
                                               static_cast<std::size_t>(state), needed));
  }
  std::vector<at::Tensor> part;
  std::vector<std::size_t> next(copies.size());
  std::size_t at = 0;
  for (const auto& tensor : tensors) {
    const auto end = at + tensor.info.bytes();
    const auto of = static_cast<std::size_t>(1 + tensor.state);
    if (std::max(mine.begin, at) < std::min(mine.end, end)) part.push_back(copies[of][next[of]++]);
    at = end;
  }
  return part;
}

checkpoint::Pieces bytes_of(const std::vector<at::Tensor>& tensors) {
  checkpoint::Pieces pieces;
  for (const auto& tensor : tensors) {
    pieces.emplace_back(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return pieces;
}

// Begins the save of a model that is split over workers, or of which each has its own state: the chief gets all of it,
// and writes it.
SharedSave begin_on_chief(ModelImpl& impl, const StateFile& file) {
  auto all = checkpoint::archive_of(impl.state.of_file(file.weights_only));
  SharedSave save;
  save.write = [] {};
  const auto& workers = impl.topology.all;
  workers.run_on_rank_0([&] {
    save.archive = std::make_shared<checkpoint::SharedArchive>(file.path, std::move(all), checkpoint::NamedTensors());
    save.write = [archive = save.archive, deadline = workers.deadline()] { archive->finish({}, 1, deadline); };
  });
  return save;
}

}  // namespace

SharedSave SharedSave::begin(ModelImpl& impl, const StateFile& file) {
  const at::NoGradGuard no_grad;
  if (impl.parameters->is_split() || (impl.gradients != nullptr && impl.gradients->outer_step() != nullptr))
    return begin_on_chief(impl, file);
  const auto& workers = impl.topology.all;
  const int rank = workers.rank();
  const auto tensors = large_tensors(impl, file.weights_only);
  auto small = checkpoint::archive_of(impl.state.small_of_file(file.weights_only));
  SharedSave save;
  std::string place;  // at which the other workers write to the chief's file
  workers.run_on_rank_0([&] {
    save.archive = std::make_shared<checkpoint::SharedArchive>(file.path, std::move(small), names_of(tensors));
    place = cluster::pack({save.archive->temporary(), text(save.archive->large_begin())});
  });
  const auto words = cluster::unpack(workers.broadcast(place)).value();
  const auto& chiefs_file = words.at(0);
  const auto large_begin = whole_number<std::size_t>(words.at(1)).value();

  // The writers are the workers that may write to the file.
  const bool sees = rank == 0 || ::access(chiefs_file.c_str(), W_OK) == 0;
  std::vector<int> writers;  // [rank]: its number among them, or -1
  int count = 0;
  for (const auto& said : workers.all_gather(sees ? "sees" : "")) writers.push_back(said.empty() ? -1 : count++);
  std::vector<ByteRange> ranges;
  for (const int writer : writers) {
    ranges.push_back(writer < 0 ? ByteRange() : checkpoint::part_of_writer(names_of(tensors), writer, count));
  }
  const auto part = copy_part(impl, tensors, ranges);
  const auto begin = ranges[static_cast<std::size_t>(rank)].begin;
  const int writer = writers[static_cast<std::size_t>(rank)];
  if (rank == 0) {
    const auto deadline = workers.deadline();
    save.write = [archive = save.archive, part, count, deadline] { archive->finish(bytes_of(part), count, deadline); };
  } else if (writer > 0) {
    save.write = [chiefs_file, large_begin, part, begin, writer] {
      checkpoint::write_part(chiefs_file, large_begin, begin, bytes_of(part), writer);
    };
  } else {
    save.write = [] {};
  }
  return save;
}

}  // namespace lockstep::train

namespace lockstep {

namespace {

// Returns the result of the chief's says() on all workers.
bool chief_says(ModelImpl& impl, const std::function<bool()>& says) {
  const auto ask = [&] {
    const auto& workers = impl.topology.all;
    ModelImpl::Numbers said{workers.rank() == 0 && says() ? 1.0 : 0.0};
    workers.sum(said);
    return said;
  };
  return impl.in_section("a checkpoint", ask).front() > 0;
}

}  // namespace

void BackgroundSave::wait() {
  if (writing_.valid()) writing_.get();
}

void BackgroundSave::begin(ModelImpl& impl, const train::StateFile& file) {
  give_up(std::chrono::seconds(0));
  was_lost_ = false;
  auto save = train::SharedSave::begin(impl, file);
  archive_ = save.archive;
  path_ = file.path;
  begun_in_ = impl.topology.all.regroups();
  is_written_ = false;
  writing_ = std::async(
      std::launch::async, [this, write = std::move(save.write), file, is_chief = archive_ != nullptr]() mutable {
        const auto once = std::exchange(write, nullptr);  // the future keeps this function, and must not keep the copy
        if (is_chief) {
          file.make(once);
        } else {
          once();
        }
        is_written_ = true;
      });
  impl.topology.all.any(false);  // where it returns on one, all have begun
}

void BackgroundSave::finish(const ModelImpl& impl) {
  const auto& workers = impl.topology.all;
  std::string mine;
  if (!archive_) {
    try {
      wait();
    } catch (const IoError& error) {
      mine = error.what();
    }
  }
  const auto problems = workers.gather(mine, 0);
  bool lost = false;
  workers.run_on_rank_0([&] {
    std::string problem;
    for (const auto& one : problems) {
      if (problem.empty()) problem = one;
    }
    const bool others_left = path_ && workers.regroups() != begun_in_;
    // All workers that are left have written their parts.
    if (archive_ && (!problem.empty() || others_left)) archive_->abandon();
    try {
      wait();
    } catch (const IoError&) {
      if (problem.empty() && !others_left) throw;
    }
    if (!problem.empty()) throw IoError(problem);
    lost = was_lost_ || !is_whole();  // was_lost_: where this call is repeated
  });
  was_lost_ = workers.any(lost);
  archive_.reset();
  path_.reset();
}

void BackgroundSave::start(const ModelImpl& impl) {
  seen_ = unwrap(impl.strategy).workers().completed_sections().generation;
}

bool BackgroundSave::was_lost(ModelImpl& impl) {
  return chief_says(impl, [this] { return was_lost_; });
}

bool BackgroundSave::is_lost(ModelImpl& impl) {
  const auto& completed = unwrap(impl.strategy).workers().completed_sections();
  const auto now = completed.generation;  // the same on all, unlike the number of a worker's regroups
  if (seen_ == now) return false;
  const bool lost = chief_says(impl, [this] { return !is_whole(); });
  seen_ = completed.generation;
  if (lost) give_up(std::chrono::seconds(0));
  return lost;
}

void BackgroundSave::give_up(std::chrono::seconds after) noexcept {
  if (archive_) archive_->abandon(after);
  try {
    wait();
  } catch (const std::exception&) {  // the save is not whole
  }
  archive_.reset();
  path_.reset();
}

}  // namespace lockstep
