#include "gradient/pass_weights.h"

#include <algorithm>
#include <utility>

namespace lockstep::gradient {

void PassWeights::announce(const Communicator& ranks, double weight, bool has_gradients, bool in_background) {
  mine_ = {weight, has_gradients ? 1.0 : 0.0};
  known_ = false;
  if (in_background) work_ = ranks.group().start(exchange(ranks), ranks.deadline());
}

Call PassWeights::exchange(const Communicator& ranks) {
  constexpr std::size_t kWords = sizeof(Weight) / sizeof(double);
  all_.resize(static_cast<std::size_t>(ranks.size()));
  auto call = Call::all_gather({&mine_, kWords, DType::float64}, {all_.data(), all_.size() * kWords, DType::float64});
  call.purpose = purpose_;
  return call;
}

void PassWeights::wait(const Communicator& ranks) {
  if (std::exchange(known_, true)) return;
  if (work_) {
    work_->wait();
  } else {
    ranks.group().run(exchange(ranks), ranks.deadline());
  }
  total_ = having_ = ranks_with_weight_ = 0;
  for (const auto& theirs : all_) {
    total_ += theirs.weight;
    having_ += theirs.has_gradients;
    ranks_with_weight_ += theirs.weight > 0 ? 1 : 0;
  }
  if (scale_ == 0) update_scale();
}

void PassWeights::end_pass() {
  update_scale();
  work_.reset();
}

void PassWeights::update_scale() {
  if (total_ > 0) scale_ = std::max(scale_, total_ / having_);
}

int PassWeights::lowest_with_gradients() const {
  const auto first = std::ranges::find_if(all_, [](const auto& rank) { return rank.has_gradients > 0; });
  return static_cast<int>(first - all_.begin());
}

}  // namespace lockstep::gradient
