#include "gradient/eight_bit_mean.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep::gradient {
namespace {

constexpr std::int64_t kBlockElements = 256;
constexpr float kLargestInt8 = 127;
constexpr auto kScaleBytes = static_cast<std::int64_t>(sizeof(float));

std::int64_t blocks_in(std::int64_t numel) { return (numel + kBlockElements - 1) / kBlockElements; }

Counts even_counts(std::int64_t numel, int ranks) {
  const auto blocks = blocks_in(numel);
  Counts counts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto begin = std::min(numel, blocks * rank / ranks * kBlockElements);
    const auto end = std::min(numel, blocks * (rank + 1) / ranks * kBlockElements);
    counts.push_back(static_cast<std::size_t>(end - begin));
  }
  return counts;
}

// The two parts of a message about `blocks` blocks: scales, and elements.
at::Tensor scales_in(const at::Tensor& message, std::int64_t blocks) {
  return message.narrow(0, 0, blocks * kScaleBytes).view(at::kFloat).view({blocks, 1});
}
at::Tensor elements_in(const at::Tensor& message, std::int64_t blocks) {
  return message.narrow(0, blocks * kScaleBytes, blocks * kBlockElements)
      .view(at::kChar)
      .view({blocks, kBlockElements});
}

// Writes values + residual to the message; what rounding loses is the new residual. `values`: [blocks, block].
void write_message(const at::Tensor& values, const at::Tensor& residual, const at::Tensor& message) {
  const auto blocks = values.size(0);
  if (blocks == 0) return;
  const auto wanted = values + residual;
  const auto scales = wanted.abs().amax(1, /*keepdim=*/true).div_(kLargestInt8);
  const auto rounded = wanted.div(at::where(scales > 0, scales, at::ones_like(scales))).round_().nan_to_num_(0);
  scales_in(message, blocks).copy_(scales);
  elements_in(message, blocks).copy_(rounded);
  at::Tensor lost = residual;
  lost.copy_(wanted.sub_(rounded * scales).nan_to_num_(0, 0, 0));
}

at::Tensor read_message(const at::Tensor& message, std::int64_t blocks) {
  return elements_in(message, blocks).to(at::kFloat).mul_(scales_in(message, blocks));
}

}  // namespace

EightBitMean::EightBitMean(int rank, std::int64_t numel, int ranks, at::Device device)
    : EightBitMean(rank, even_counts(numel, ranks), device) {}

EightBitMean::EightBitMean(int rank, const Counts& counts, at::Device device) {
  std::int64_t begin = 0, place = 0;
  const auto bytes = at::TensorOptions(device).dtype(at::kByte);
  const auto floats = at::TensorOptions(device).dtype(at::kFloat);
  for (const auto count : counts) {
    const auto numel = static_cast<std::int64_t>(count), blocks = blocks_in(numel);
    ranges_.push_back({begin, numel, blocks, place, blocks * (kScaleBytes + kBlockElements)});
    begin += numel;
    place += ranges_.back().bytes;
  }
  const auto ranks = static_cast<std::int64_t>(counts.size());
  own_ = ranges_[static_cast<std::size_t>(rank)];
  sent_ = at::zeros({place}, bytes);
  received_ = at::zeros({ranks * own_.bytes}, bytes);
  gathered_ = at::zeros({place}, bytes);
  for (const auto& range : ranges_) residuals_.push_back(at::zeros({range.blocks, kBlockElements}, floats));
  residuals_.push_back(at::zeros({own_.blocks, kBlockElements}, floats));
}

void EightBitMean::for_residuals(const std::vector<Elements>& elements,
                                 const std::function<void(at::Tensor)>& act) const {
  const auto visit = [&](const Range& range, const at::Tensor& residual) {
    for (const auto& some : elements) {
      const auto begin = std::max(some.begin, range.begin);
      const auto end = std::min(some.begin + some.numel, range.begin + range.numel);
      if (begin < end) act(residual.view({-1}).narrow(0, begin - range.begin, end - begin));
    }
  };
  for (std::size_t rank = 0; rank < ranges_.size(); ++rank) visit(ranges_[rank], residuals_[rank]);
  visit(own_, residuals_.back());
}

void EightBitMean::reduce(const at::Tensor& values, bool gathers, const Group::RunCalls& run,
                          const std::vector<Elements>& idle) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> kept;
  for_residuals(idle, [&](at::Tensor residual) {
    kept.push_back(residual.clone());
    residual.zero_();
  });
  exchange(values, gathers, run);
  std::size_t next = 0;
  for_residuals(idle, [&](at::Tensor residual) { residual.copy_(kept[next++]); });
}

void EightBitMean::exchange(const at::Tensor& values, bool gathers, const Group::RunCalls& run) const {
  Counts to_each, from_each(ranges_.size(), static_cast<std::size_t>(own_.bytes));
  for (std::size_t rank = 0; rank < ranges_.size(); ++rank) {
    const auto& range = ranges_[rank];
    to_each.push_back(static_cast<std::size_t>(range.bytes));
    const auto blocks = at::zeros({range.blocks * kBlockElements}, values.options());
    blocks.narrow(0, 0, range.numel).copy_(values.narrow(0, range.begin, range.numel));
    write_message(blocks.view({range.blocks, kBlockElements}), residuals_[rank],
                  sent_.narrow(0, range.place, range.bytes));
  }
  run({Call::all_to_all(buffer_of(sent_), buffer_of(received_), to_each, from_each)});

  const auto mean = at::zeros({own_.blocks, kBlockElements}, values.options());
  for (std::size_t rank = 0; rank < ranges_.size(); ++rank) {
    const auto theirs = received_.narrow(0, static_cast<std::int64_t>(rank) * own_.bytes, own_.bytes);
    if (own_.blocks > 0) mean.add_(read_message(theirs, own_.blocks));
  }
  mean.div_(static_cast<double>(ranges_.size()));
  if (!gathers) {
    values.narrow(0, own_.begin, own_.numel).copy_(mean.view({-1}).narrow(0, 0, own_.numel));
    return;
  }

  const auto own = at::empty({own_.bytes}, gathered_.options());
  write_message(mean, residuals_.back(), own);
  run({Call::all_gather(buffer_of(own), buffer_of(gathered_), to_each)});
  for (const auto& range : ranges_) {
    if (range.blocks == 0) continue;
    const auto theirs = read_message(gathered_.narrow(0, range.place, range.bytes), range.blocks);
    values.narrow(0, range.begin, range.numel).copy_(theirs.view({-1}).narrow(0, 0, range.numel));
  }
}

}  // namespace lockstep::gradient
