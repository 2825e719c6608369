#include "gradient/workers.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Buffer bytes_of(std::span<char> bytes) { return {bytes.data(), bytes.size(), DType::uint8}; }
Buffer bytes_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), static_cast<std::size_t>(tensor.nbytes()), DType::uint8};
}

}  // namespace

bool may_overlap(const Group& group, bool idle_cores) {
  return idle_cores || (group.backend() != "shm" && group.backend() != "threads");
}

void Workers::give_up(const std::string& why) const {
  if (!alone()) group().abort(text("worker ", rank(), ": ", why));
}

void Workers::sum(std::span<double> values) const {
  if (!alone()) group().all_reduce(buffer_of(values), ReduceOp::sum, deadline());
}

bool Workers::any(bool holds) const {
  double count = holds ? 1 : 0;
  sum({&count, 1});
  return count > 0;
}

bool Workers::all(bool holds) const { return !any(!holds); }

void Workers::share(const std::vector<at::Tensor>& tensors) const {
  if (alone()) return;
  const at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.detach().to(at::kCPU).contiguous().clone();
    group().broadcast(bytes_of(bytes), 0, deadline());
    if (!is_chief()) tensor.copy_(bytes);
  }
}

std::string Workers::share(const std::string& bytes) const {
  if (alone()) return bytes;
  std::int64_t length = static_cast<std::int64_t>(bytes.size());
  group().broadcast(buffer_of(std::span(&length, 1)), 0, deadline());
  std::string shared = is_chief() ? bytes : std::string(static_cast<std::size_t>(length), '\0');
  group().broadcast(bytes_of(shared), 0, deadline());
  return shared;
}

std::shared_ptr<const SharedBy> Workers::shared_by() const {
  if (alone()) return nullptr;
  return std::make_shared<SharedBy>(
      SharedBy{.on_chief = [workers = *this](const std::function<void()>& act) { workers.on_chief(act); },
               .share = [workers = *this](const std::string& bytes) { return workers.share(bytes); }});
}

void Workers::require_same(const std::string& what, const std::string& mine) const {
  const auto all = all_gather(mine);
  const auto other = std::find_if(all.begin(), all.end(), [&](const auto& theirs) { return theirs != all[0]; });
  if (other == all.end()) return;
  const auto [chiefs, theirs] = first_difference(all[0], *other);
  throw InvalidArgument(
      text("the workers' ", what, " differ: worker 0 has ", chiefs, ", worker ", other - all.begin(), " has ", theirs));
}

std::vector<std::string> Workers::all_gather(const std::string& mine) const {
  if (alone()) return {mine};
  std::int64_t length = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(size()));
  group().all_gather(buffer_of(std::span(&length, 1)), buffer_of(std::span(lengths)), deadline());
  std::string input = mine, output;
  Counts counts;
  for (const auto bytes : lengths) {
    counts.push_back(static_cast<std::size_t>(bytes));
    output.resize(output.size() + counts.back());
  }
  group().run(Call::all_gather(bytes_of(input), bytes_of(output), counts), deadline());
  std::vector<std::string> all;
  std::size_t at = 0;
  for (const auto count : counts) {
    all.push_back(output.substr(at, count));
    at += count;
  }
  return all;
}

}  // namespace lockstep
