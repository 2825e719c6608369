// Parameters of several stages that are one in the unsplit model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/pipeline.h"

namespace lockstep::parallel {

using StageModules = std::vector<std::pair<int, std::shared_ptr<torch::nn::Module>>>;  // by stage

// One such parameter: this rank's copies of it, and the ranks that have some.
class TiedParameter {
 public:
  // Collective over the pipeline's ranks. All copies get the first one's values. Throws InvalidArgument as Pipeline.
  TiedParameter(const std::vector<StageParameter>& copies, const PipelineSchedule& schedule, const StageModules& mine,
                const Communicator& ranks);

  // Called after a regroup of the pipeline's ranks. Collective over them.
  void regroup(const Communicator& ranks);

  // Before a step: puts aside the gradients of earlier steps.
  void begin_step();

  // After a step: gives each copy the sum of the copies' gradients of this step, added to those of earlier steps. Where
  // no copy has a gradient of this step, the earlier ones stay. Collective over the ranks that have copies. Throws
  // InvalidArgument, on all of them, where some copies are frozen.
  void finish_step();

  // Throws InvalidArgument where fully_shard has divided a copy: backward does not leave the copy's gradient then.
  void check_not_sharded() const;

 private:
  std::string name_;   // the first copy's
  double copies_ = 0;  // on all ranks
  std::vector<Tensor> mine_;
  std::vector<Tensor> earlier_;  // gradients of mine_
  bool has_first_ = false;       // of the copies
  Communicator ranks_;           // those that have copies
};

// True where a parameter is one of several copies and not the first.
bool is_tied_copy(const Tensor& parameter);

}  // namespace lockstep::parallel
