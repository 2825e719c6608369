// The outer step where ranks are lost, leave and come.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <sstream>

#include "base/text.h"
#include "checkpoint/state.h"
#include "gradient/outer_step.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::gradient {
namespace {

// How far a rank is. An exchange that is complete on one rank has had the part of every rank.
struct Standing {
  bool has_state = true;
  std::int64_t meetings = 0;
  bool is_together = true;

  std::string print() const { return text(has_state ? 1 : 0, " ", meetings, " ", is_together ? 1 : 0); }
  static Standing parse(const std::string& printed) {
    Standing standing;
    std::istringstream(printed) >> standing.has_state >> standing.meetings >> standing.is_together;
    return standing;
  }
  bool is_behind(const Standing& other) const {
    return std::pair(has_state, meetings) < std::pair(other.has_state, other.meetings);
  }
};

}  // namespace

void OuterStep::regroup() {
  end_work();
  for (auto& part : parts_) {
    for (auto& piece : part.pieces) {
      if (piece.in_8_bits) make_eight_bit_mean(piece);
    }
  }
  std::vector<Standing> all;
  const Standing mine{has_state_, meetings_, is_together_};
  for (const auto& printed : ranks_.all_gather(mine.print())) all.push_back(Standing::parse(printed));
  const auto first = std::ranges::max_element(all, [](const auto& a, const auto& b) { return a.is_behind(b); });
  if (!first->has_state) {
    throw ClusterError("all workers that had the state of the training were lost before this one got it");
  }
  const auto lacks = [&](const Standing& one) { return one.is_behind(*first); };
  if (std::ranges::any_of(all, lacks))
    take_state_of(static_cast<int>(first - all.begin()), lacks(mine), first->meetings);
  // The others' values are their anchors: they add nothing to the sum.
  const auto apart = std::ranges::count_if(all, [&](const auto& one) { return !lacks(one) && !one.is_together; });
  if (apart > 0) bring_together(static_cast<double>(all.size()) / static_cast<double>(apart));
}

// Gives anchors and velocities of a rank to those that lack them. What these have done since their last meeting is in
// that rank's anchors, or was made from no state of these ranks.
void OuterStep::take_state_of(int rank, bool lacks, std::int64_t meetings) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> taken;  // whole, or not at all: another rank may be lost meanwhile
  for (const auto& [name, tensor] : shared()) taken.push_back(lacks ? at::empty_like(tensor) : tensor);
  broadcast(ranks_.with_purpose(Purpose("the state of an outer step")), taken, rank);
  if (!lacks) return;
  auto next = taken.begin();
  for (const auto& [name, tensor] : shared()) tensor.copy_(*next++);
  for (auto& part : parts_) {
    for (auto& piece : part.pieces) set_values(piece, /*mixing=*/0);
  }
  meetings_ = meetings;
  has_state_ = is_together_ = true;
}

void OuterStep::skip_step() {
  ++steps_;
  ++since_;
}

Trackable OuterStep::counts() { return checkpoint::compose({{"steps", track(steps_)}, {"since", track(since_)}}); }

}  // namespace lockstep::gradient
