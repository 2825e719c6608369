// A pipeline's step with layers that compute over ranks of other pipelines (gradient/layer_over_ranks.h).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "gradient/layer_over_ranks.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::parallel {

// Pipelines call such a layer together: each for as many microbatches as the one with most examples has. While this
// object lives, the layers' backwards have the weight of the whole batch.
class StepOverRanks {
 public:
  using Layers = std::vector<std::shared_ptr<gradient::LayerOverRanks>>;

  // `layers`: of this rank's stages; may be none where other ranks of the pipeline have some. Collective over the mesh
  // whose axis `pipeline` is. Throws InvalidArgument where a layer's ranks are not of that mesh.
  StepOverRanks(Layers layers, const Communicator& pipeline, std::int64_t examples);
  ~StepOverRanks();
  StepOverRanks(const StepOverRanks&) = delete;
  StepOverRanks& operator=(const StepOverRanks&) = delete;

  // The examples of the pipeline that has most.
  std::int64_t most_examples() const { return most_examples_; }

  // Collective over the pipeline. `weight` is called on its rank `last` alone, and not without examples.
  void set_weight(const std::function<double()>& weight, int last);

 private:
  const Layers layers_;
  const Communicator pipeline_;
  const std::int64_t examples_;
  std::int64_t most_examples_ = 0;
};

}  // namespace lockstep::parallel
