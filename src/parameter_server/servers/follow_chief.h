// fit on the processes of a cluster with parameter servers that are not its chief, and the buffers that workers report.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/train/model.h"
#include "train/signal_guard.h"

namespace lockstep::servers {

// Follows the chief's fit, call number `call`: a worker computes the steps that the chief assigns, a server makes its
// part of the model, an evaluator follows checkpoints. Returns the fit's outcome (evaluate.h). Throws what a step
// throws, and Interrupted: a worker after its step, a server when the chief has ended the fit.
// `evaluated_step`: an evaluator's, the step of the last checkpoint that it evaluated.
std::string follow_chief(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call,
                         std::int64_t& evaluated_step);

// fit on the evaluator of a cluster with parameter servers. Evaluates validation_data with the full checkpoints that
// the chief writes in its fit, call number `call`. A checkpoint that is replaced before it was read is left out. Prints
// the results, and gives them to the callbacks' on_test_end. Returns after the last checkpoint when the chief's fit has
// ended, or when a signal came; at once where there are no validation_data. Follows keras.utils.SidecarEvaluator.
void follow_checkpoints(Model& model, const FitOptions& options, std::int64_t call, std::int64_t& evaluated_step,
                        const train::SignalGuard& signals);

// The buffers of a model whose variables are on parameter servers: workers report them to the chief.

// A worker's buffers, such as BatchNorm's running statistics, which it reports to the chief when they have changed.
class ChangedBuffers {
 public:
  explicit ChangedBuffers(const ReplicatedParameters& parameters);

  // Returns the buffers that changed since the last call, by number: their mean over the worker's replicas. The number
  // after the last buffer's has the count of examples that the replicas have seen.
  std::map<int, std::string> take();

 private:
  const ReplicatedParameters& parameters_;
  // [buffer][replica]: hashes, since LibTorch's batch_norm does not count its writes as new versions
  std::vector<std::vector<std::uint64_t>> hashes_;
};

// Gives the chief's buffers the mean of those that the workers reported, by the examples that each has seen. A buffer
// whose dtype is not floating-point gets the value of the worker that has seen most.
void load_reported_buffers(ReplicatedParameters& parameters,
                           const std::map<int, std::map<int, std::string>>& by_worker);

}  // namespace lockstep::servers
