#include "parallel/measure_links.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "base/median.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/parallel/gradients.h"
#include "parallel/pipeline_run.h"

namespace lockstep::parallel {
namespace {

constexpr std::array<std::int64_t, 7> kSizes{1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25};
constexpr double kLongSeconds = 0.1;  // larger sizes than one that takes so long follow from it
constexpr int kLinkRuns = 9;

Tensor values(double bytes) { return at::ones({static_cast<std::int64_t>(bytes) / 4}, at::kFloat); }

}  // namespace

const Communicator& MeasuredLinks::group(int count, int stride) {
  const auto [found, is_new] = groups_.try_emplace({count, count == 1 ? 1 : stride});
  if (is_new && count > 1) {
    const int rank = all_.rank();
    const int color = rank / (count * stride) * stride + rank % stride;
    found->second = all_.with_group(*all_.group().split(color, rank, all_.deadline()));
  }
  return found->second;
}

LinkTimes MeasuredLinks::measure(int ranks, const Prepare& prepare) const {
  LinkTimes times{.ranks = ranks};
  for (const auto size : kSizes) {
    const auto bytes = static_cast<double>(size);
    const auto act = prepare(bytes);
    act();
    std::vector<double> runs;
    for (int i = 0; i < kLinkRuns; ++i) {
      all_.group().barrier(all_.deadline());
      runs.push_back(seconds_of(act));
    }
    double mean = median(std::move(runs));
    all_.sum({&mean, 1});
    times.seconds.emplace_back(bytes, mean / all_.size());
    if (times.seconds.back().second > kLongSeconds) break;
  }
  return times;
}

LinkTimes MeasuredLinks::average(int ranks) {
  int count = std::min(ranks, all_.size());
  while (!has(count)) --count;
  if (count == 1) count = all_.size();
  const auto& data = group(count, all_.size() / count);
  return measure(count, [&](double bytes) -> std::function<void()> {
    std::vector<Tensor> parameters;
    constexpr double kPiece = 1 << 20;
    for (double at = 0; at < bytes; at += kPiece) {
      parameters.push_back(values(std::min(kPiece, bytes - at)).requires_grad_());
      parameters.back().mutable_grad() = values(std::min(kPiece, bytes - at));
    }
    return [&data, parameters] { average_gradients(parameters, data); };
  });
}

LinkTimes MeasuredLinks::message(int tensor) {
  // Pairs of ranks send to each other in turns; one that is left over is idle.
  const int stride = all_.size() % (2 * tensor) == 0 ? tensor : 1;
  const auto& both = group(2, stride);
  const bool is_in_pair = both.size() == 2;
  StageLinks links(both,
                   is_in_pair ? std::vector<std::pair<int, int>>{{0, 1}, {1, 0}} : std::vector<std::pair<int, int>>{});
  auto times = measure(2, [&](double bytes) -> std::function<void()> {
    if (!is_in_pair) return [] {};
    return [&, sent = values(bytes)] {
      const int other = 1 - both.rank();
      if (both.rank() == 0) links.send(other, {}, sent);
      links.receive(other, {});
      if (both.rank() == 1) links.send(other, {}, sent);
      links.flush();
    };
  });
  for (auto& each : times.seconds) each.second /= 2;  // there and back
  return times;
}

const LinkTimes& MeasuredLinks::collective(Call::Kind kind) {
  const auto found = collectives_.find(kind);
  if (found != collectives_.end()) return found->second;
  const auto size = static_cast<std::size_t>(all_.size());
  const auto prepare = [&](double bytes) -> std::function<void()> {
    const auto large = values(std::max(bytes, 4.0 * all_.size()));
    const auto part = at::ones({large.numel() / all_.size()}, at::kFloat);
    return [&, large, part] {
      const Buffer whole{large.mutable_data_ptr(), static_cast<std::size_t>(part.numel()) * size};
      const auto& group = all_.group();
      switch (kind) {
        case Call::Kind::all_gather: return group.all_gather(buffer_of(part), whole, all_.deadline());
        case Call::Kind::reduce_scatter:
          return group.reduce_scatter(whole, buffer_of(part), ReduceOp::sum, all_.deadline());
        default: return group.all_reduce(whole, ReduceOp::sum, all_.deadline());
      }
    };
  };
  return collectives_[kind] = measure(all_.size(), prepare);
}

}  // namespace lockstep::parallel
