// Pipeline schedules as data: what each rank does with which microbatch, in which order. Torch-free.
//
// A schedule of your own is a PipelineSchedule that you fill in; check_schedule finds what is missing in it, and waits
// that would never end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Stages are parts of a model, one after the other: 0, 1, ... Microbatches are parts of a batch.
struct PipelineAction {
  enum class Kind : std::uint8_t {
    forward,
    backward,         // gradients of the stage's inputs and of its weights
    backward_input,   // of its inputs, and of what is no weight of a linear layer
    backward_weight,  // of the weights of linear layers: any time after backward_input
  };

  Kind kind = Kind::forward;
  int stage = 0;
  int microbatch = 0;

  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

const char* name_of(PipelineAction::Kind kind);  // "forward", ...

struct PipelineSchedule {
  std::string name;
  int microbatches = 1;
  std::vector<int> rank_of_stage;                    // [stage]
  std::vector<std::vector<PipelineAction>> actions;  // [rank]: in the order in which it carries them out

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
  int ranks() const { return static_cast<int>(actions.size()); }
};

// Seconds, or any other unit, of one microbatch at one stage.
struct PipelineCosts {
  double forward = 1;
  double backward_input = 1, backward_weight = 1;  // together: of a `backward`
  double message = 0;                              // from one rank to another
};

// Each makes a schedule of `stages` stages on `ranks` ranks. Some choose their order by `costs`, of each stage or one
// for all. Throw InvalidArgument for numbers below 1, and where the schedule is not made for them.
namespace schedules {

// All forwards, then all backwards; a rank keeps the activations of all microbatches. As many stages as ranks. Huang et
// al. 2019.
PipelineSchedule gpipe(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& costs = {{}});

// One forward, one backward: rank r keeps the activations of at most ranks - r microbatches. As many stages as ranks.
// Narayanan et al. 2019.
PipelineSchedule one_forward_one_backward(int ranks, int stages, int microbatches,
                                          const std::vector<PipelineCosts>& costs = {{}});

// Stages go round: stage i is on rank i % ranks, so that pipelines fill sooner. A multiple of `ranks` stages, and of
// microbatches. Narayanan et al. 2021.
PipelineSchedule interleaved(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& costs = {{}});

// Gradients of weights are computed where a rank would wait; a rank keeps the activations of at most `ranks`
// microbatches. As many stages as ranks. ZB-H1 of Qi et al. 2024.
PipelineSchedule zero_bubble(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& costs = {{}});

// zero_bubble with two stages a rank, forth and back: rank r has the stages r and 2 ranks - 1 - r. So one rank has the
// first and the last stage. ZB-V of Qi et al. 2024.
PipelineSchedule zero_bubble_v(int ranks, int stages, int microbatches, const std::vector<PipelineCosts>& costs = {{}});

}  // namespace schedules

using MakePipelineSchedule = PipelineSchedule (*)(int ranks, int stages, int microbatches,
                                                  const std::vector<PipelineCosts>& costs);

// Throws InvalidArgument where a forward or a backward of a microbatch is missing, is there twice or is on a rank that
// does not have the stage. Throws it also where ranks would wait for each other for ever, and names who waits for what.
void check_schedule(const PipelineSchedule& schedule);

struct PipelineTimes {
  struct Span {
    double begin = 0, end = 0;
  };
  std::vector<std::vector<Span>> of_actions;  // [rank][action]
  double total = 0;                           // of the whole schedule
  double idle_share = 0;                      // of all ranks' time: the bubble
};

// When each action begins and ends where a rank carries out an action as soon as what it needs is there. `costs`: of
// each stage, or one for all. Throws as check_schedule.
PipelineTimes predict_times(const PipelineSchedule& schedule, const std::vector<PipelineCosts>& costs = {{}});

// A line for each rank; time goes to the right. F2: forward of microbatch 2, B: backward, I and W: backward_input and
// backward_weight; with several stages a rank F2' is of its second stage. Throws as check_schedule.
std::string draw_schedule(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

}  // namespace lockstep
