#include "train/local_state.h"

#include <ATen/ATen.h>

#include <cstring>
#include <span>

#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "data/stored_tensor.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

Tensor tensor_of(const std::string& bytes, const Tensor& like) {
  auto tensor = at::empty(like.sizes(), like.scalar_type());
  if (bytes.size() != tensor.nbytes()) {
    throw InvalidArgument(text("a worker reported ", bytes.size(), " bytes of a buffer of ", tensor.nbytes()));
  }
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

}  // namespace

std::string print_local_state(const ModelImpl& impl) {
  const auto& parameters = *impl.parameters;
  Archive archive;
  archive.entries["seed"] = std::to_string(static_cast<std::int64_t>(impl.seed));
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    const auto& slot = parameters.slots()[i];
    if (!slot.trainable) archive.tensors[slot.name] = data::to_stored(parameters.parameter(0, i));
  }
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    archive.tensors[parameters.buffer_names()[i]] = data::to_stored(parameters.average_buffer(i));
  }
  return checkpoint::print_archive(archive);
}

void load_local_state(ModelImpl& impl, const std::string& printed) {
  auto& parameters = *impl.parameters;
  const auto archive = checkpoint::parse_archive("the chief's model", std::as_bytes(std::span(printed)));
  impl.seed = static_cast<std::uint64_t>(archive.integer("seed"));
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    const auto& slot = parameters.slots()[i];
    if (!slot.trainable) parameters.assign(i, data::from_stored(archive.tensor(slot.name)));
  }
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    parameters.assign_buffer(i, data::from_stored(archive.tensor(parameters.buffer_names()[i])));
  }
}

ChangedBuffers::ChangedBuffers(const ReplicatedParameters& parameters) : parameters_(parameters) {
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    hashes_.push_back(gradient::hash_of(parameters.buffer(0, i)));
  }
}

std::map<int, std::string> ChangedBuffers::take() {
  std::map<int, std::string> changed;
  for (std::size_t i = 0; i < hashes_.size(); ++i) {
    const auto hash = gradient::hash_of(parameters_.buffer(0, i));
    if (std::exchange(hashes_[i], hash) == hash) continue;
    const auto mean = parameters_.average_buffer(i).cpu().contiguous();
    changed[static_cast<int>(i)] = {static_cast<const char*>(mean.const_data_ptr()), mean.nbytes()};
  }
  return changed;
}

void load_reported_buffers(ReplicatedParameters& parameters,
                           const std::map<int, std::map<int, std::string>>& by_worker) {
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    const auto& own = parameters.buffer(0, i);
    std::vector<Tensor> reported;
    for (const auto& [worker, buffers] : by_worker) {
      if (const auto found = buffers.find(static_cast<int>(i)); found != buffers.end()) {
        reported.push_back(tensor_of(found->second, own));
      }
    }
    if (reported.empty()) continue;
    auto mean = reported[0];
    if (own.is_floating_point() && reported.size() > 1) {
      auto sum = mean.to(at::kDouble);
      for (std::size_t k = 1; k < reported.size(); ++k) sum += reported[k];
      mean = sum / static_cast<double>(reported.size());
    }
    parameters.assign_buffer(i, mean);
  }
}

}  // namespace lockstep::train
